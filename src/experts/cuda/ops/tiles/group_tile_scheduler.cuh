// Tile scheduler of GEMMs that contract over the rows of each group: lists the tiles of every group's result.
#pragma once

#include <cstdint>

#include "experts/cuda/ops/tiles/group_bounds.cuh"
#include "experts/cuda/ops/tiles/tile.cuh"

namespace anabranch::cuda {

struct GroupTiles {
  Groups groups;
  int32_t rows;  // per result
  int32_t row_tiles;
  int32_t column_tiles;
};

// Goes through the groups in order, and through the tiles of a group by place_of(). A tile sums over all rows of its
// group. Used by one whole warp.
template <int kRows, int kColumns>
class GroupTileScheduler {
 public:
  __device__ explicit GroupTileScheduler(const GroupTiles& tiles) : tiles_(tiles), bounds_(tiles.groups) {}

  // Returns the CTA's n-th tile. Must be called for consecutive n; CTAs take tiles in turn.
  __device__ Tile next(int n) {
    const int32_t index = static_cast<int32_t>(blockIdx.x) + n * static_cast<int32_t>(gridDim.x);
    const int32_t count = tiles_.row_tiles * tiles_.column_tiles;
    const int32_t group = index / count;
    if (group >= tiles_.groups.E) return {.expert = kNoTile};
    while (group >= bounds_.first() + kWarp) bounds_.move_on();
    const int32_t begin = __shfl_sync(kAllLanes, bounds_.begin(), group - bounds_.first());
    const int32_t end = __shfl_sync(kAllLanes, bounds_.end(), group - bounds_.first());
    const TilePlace place = place_of(index - group * count, tiles_.row_tiles, tiles_.column_tiles);
    return {.expert = group,
            .row = place.row * kRows,
            .end_row = tiles_.rows,
            .column = place.column * kColumns,
            .k = begin,
            .end_k = end,
            .k_blocks = (end - begin + kBlockK - 1) / kBlockK,
            .first_k_block = 0,
            .partial = kWhole};
  }

 private:
  const GroupTiles& tiles_;
  GroupBounds bounds_;
};

}  // namespace anabranch::cuda
