// Launches grouped GEMMs.
#pragma once

#include <algorithm>

#include "experts/hopper/kernel.cuh"

namespace anabranch::cuda::hopper {

// tiles: upper bound on the number of tiles.
template <class P>
ab_status launch_product(const char* name, const P& product, int64_t tiles, int multiprocessors, cudaStream_t stream,
                         bool overlaps_previous = true) {
  using Shape = typename P::Shape;
  static_assert(sizeof(SharedMemory<Shape>) <= 227 << 10, "a CTA has at most 227 KiB of shared memory");
  const int64_t clusters = std::min<int64_t>(tiles, std::max(multiprocessors / Shape::kBlocks, 1));
  return launch(name, grouped_gemm_wgmma<P>,
                {clusters * Shape::kBlocks, Shape::kThreads, sizeof(SharedMemory<Shape>), stream, overlaps_previous,
                 Shape::kBlocks},
                product);
}

}  // namespace anabranch::cuda::hopper
