// Launches grouped products.
#pragma once

#include <algorithm>

#include "experts/hopper/kernel.cuh"

namespace anabranch::cuda::hopper {

// tiles: at most so many there are.
template <class P>
ab_status launch_product(const char* name, const P& product, int64_t tiles, int multiprocessors, cudaStream_t stream,
                         bool overlaps_previous = true) {
  using Shape = typename P::Shape;
  static_assert(sizeof(SharedMemory<Shape>) <= 227 << 10, "more shared memory than a block can have");
  const int64_t clusters = std::min<int64_t>(tiles, std::max(multiprocessors / Shape::kBlocks, 1));
  return launch(name, grouped_product<P>,
                {clusters * Shape::kBlocks, Shape::kThreads, sizeof(SharedMemory<Shape>), stream, overlaps_previous,
                 Shape::kBlocks},
                product);
}

}  // namespace anabranch::cuda::hopper
