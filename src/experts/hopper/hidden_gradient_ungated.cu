#include "experts/hopper/hidden_gradient.cuh"

namespace anabranch::cuda {

ab_status multiply_hidden_ungated(const HiddenGradient& gradient, TileChoice tile, int multiprocessors,
                                  cudaStream_t stream) {
  return launch_hidden<1>(gradient, tile, multiprocessors, stream);
}

}  // namespace anabranch::cuda
