// Which tiles there are in a product over the terms of groups: those of every group's result.
#pragma once

#include <cstdint>

#include "experts/hopper/group_rows.cuh"
#include "experts/hopper/tile.cuh"

namespace anabranch::cuda {

struct GroupTerms {
  const int32_t* sizes;  // [E]; negative ones count as 0, terms past R are cut
  int32_t E;
  int32_t R;
  int32_t rows;  // of a result
  int32_t row_tiles;
  int32_t column_tiles;
};

// Group after group, within a group as in place_of(); a tile sums all terms of its group. Used by one whole warp.
template <int kRows, int kColumns>
class GroupTermTiles {
 public:
  __device__ explicit GroupTermTiles(const GroupTerms& groups)
      : groups_(groups), terms_(groups.sizes, groups.E, groups.R) {}

  // The block's n-th tile, one after another: blocks take them in turn.
  __device__ Tile next(int n) {
    const int32_t index = static_cast<int32_t>(blockIdx.x) + n * static_cast<int32_t>(gridDim.x);
    const int32_t tiles = groups_.row_tiles * groups_.column_tiles;
    const int32_t group = index / tiles;
    if (group >= groups_.E) return {.expert = kNoTile};
    while (group >= terms_.first() + kWarp) terms_.move_on();
    const int32_t begin = __shfl_sync(kAllLanes, terms_.begin(), group - terms_.first());
    const int32_t end = __shfl_sync(kAllLanes, terms_.end(), group - terms_.first());
    const TilePlace place = place_of(index - group * tiles, groups_.row_tiles, groups_.column_tiles);
    return {.expert = group,
            .row = place.row * kRows,
            .end_row = groups_.rows,
            .column = place.column * kColumns,
            .term = begin,
            .end_term = end,
            .steps = (end - begin + kStepTerms - 1) / kStepTerms,
            .first_step = 0,
            .partial = kWhole};
  }

 private:
  const GroupTerms& groups_;
  GroupRows terms_;
};

}  // namespace anabranch::cuda
