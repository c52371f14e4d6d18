#include "experts/hopper/up.cuh"

namespace anabranch::cuda {

ab_status multiply_up_ungated(const UpProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  return launch_up<1>(product, tile, multiprocessors, stream);
}

}  // namespace anabranch::cuda
