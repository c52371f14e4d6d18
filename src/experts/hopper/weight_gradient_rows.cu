#include "experts/hopper/weight_gradient.cuh"

namespace anabranch::cuda {

ab_status multiply_row_terms(const WeightGradient& gradient, TileChoice tile, const SegmentBounds& bounds,
                             const SegmentList& list, int multiprocessors, cudaStream_t stream) {
  return launch_terms<Gathered::nothing>(gradient, tile, bounds, list, multiprocessors, stream);
}

}  // namespace anabranch::cuda
