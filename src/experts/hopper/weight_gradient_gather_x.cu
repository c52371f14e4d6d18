#include "experts/hopper/weight_gradient.cuh"

namespace anabranch::cuda {

ab_status multiply_gathered_x(const WeightGradient& gradient, TileChoice tile, const SegmentBounds& bounds,
                              const SegmentList& list, int multiprocessors, cudaStream_t stream) {
  return launch_terms<Gathered::x>(gradient, tile, bounds, list, multiprocessors, stream);
}

}  // namespace anabranch::cuda
