// Launches grouped products, and the shapes of tiles that they are built for.
#pragma once

#include <algorithm>

#include "experts/hopper/kernel.cuh"

namespace anabranch::cuda {

// Tile shapes, each with the ring that fills shared memory beside the strips.
using Tile128x256 = TileShape<128, 256, 4, 1>;
using Tile128x192 = TileShape<128, 192, 4, 2>;
using Tile128x128 = TileShape<128, 128, 6, 2>;

// The same for clusters of two blocks.
template <class Shape>
using InPairs = TileShape<Shape::kRows, Shape::kColumns, Shape::kStages, Shape::kTeams, 2>;

// tiles: at most so many there are.
template <class P>
ab_status launch_product(const char* name, const P& product, int64_t tiles, int multiprocessors, cudaStream_t stream,
                         bool overlaps_previous = true) {
  using Shape = typename P::Shape;
  static_assert(sizeof(SharedMemory<Shape>) <= 227 << 10, "shared memory of a block");
  const int64_t clusters = std::min<int64_t>(tiles, std::max(multiprocessors / Shape::kBlocks, 1));
  return launch(name, grouped_product<P>,
                {clusters * Shape::kBlocks, Shape::kThreads, sizeof(SharedMemory<Shape>), stream, overlaps_previous,
                 Shape::kBlocks},
                product);
}

}  // namespace anabranch::cuda
