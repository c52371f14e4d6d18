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
  static_assert(sizeof(SharedMemory<Shape>) <= (228 / Shape::kCtasPerSm - 1) << 10,
                "an SM has 228 KiB of shared memory, of which each CTA needs one more than it asks for");
  const int64_t clusters = std::min<int64_t>(tiles, std::max(multiprocessors * Shape::kCtasPerSm / Shape::kBlocks, 1));
  return launch(name, grouped_gemm_wgmma<P>,
                {clusters * Shape::kBlocks, Shape::kThreads, sizeof(SharedMemory<Shape>), stream, overlaps_previous,
                 Shape::kBlocks, Shape::kCtasPerSm > 1 ? Shape::kCtasPerSm : 0},
                product);
}

}  // namespace anabranch::cuda::hopper
