#include "experts/hopper/up.cuh"

namespace anabranch::cuda {

ab_status multiply_up_gated(const UpProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  return launch_up<2>(product, tile, multiprocessors, stream);
}

}  // namespace anabranch::cuda
