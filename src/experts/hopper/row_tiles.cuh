// Which tiles there are in a product over the rows of groups.
#pragma once

#include <cstdint>

#include "experts/hopper/group_rows.cuh"
#include "experts/hopper/tile.cuh"

namespace anabranch::cuda {

// A product out[R, columns] of groups of rows, cut into tiles.
struct RowGroups {
  const int32_t* sizes;  // [E]; negative ones count as 0, rows past R are cut
  int32_t E;
  int32_t R;
  int32_t terms;
  int32_t column_tiles;
};

// At most this many tiles of kRows rows there are over R rows in E groups: rows past the groups are one group more.
constexpr int64_t most_row_tiles(int64_t R, int64_t E, int64_t rows) { return (R + rows - 1) / rows + E + 1; }

// Tiles in one order for all blocks: expert after expert, within an expert as in place_of(). Used by one whole warp.
template <int kRows, int kColumns>
class RowTiles {
 public:
  __device__ explicit RowTiles(const RowGroups& groups) : groups_(groups), rows_(groups.sizes, groups.E, groups.R) {
    count_tiles();
  }

  // The block's n-th tile, one after another: blocks take them in turn.
  __device__ Tile next(int n) { return at(static_cast<int32_t>(blockIdx.x) + n * static_cast<int32_t>(gridDim.x)); }

  // The index-th tile; indices must not decrease from call to call.
  __device__ Tile at(int32_t index) {
    while (index >= end_tile()) {
      if (rows_.first() + kWarp > groups_.E) return {.expert = kNoTile};
      rows_.move_on();
      count_tiles();
    }
    const unsigned ends_later = __ballot_sync(kAllLanes, index < lane_end_tile_);
    const int lane = __ffs(static_cast<int>(ends_later)) - 1;
    const int32_t begin = __shfl_sync(kAllLanes, rows_.begin(), lane);
    const int32_t end = __shfl_sync(kAllLanes, rows_.end(), lane);
    const int32_t row_tiles = tiles_of(end - begin);
    const int32_t in_group = index - (__shfl_sync(kAllLanes, lane_end_tile_, lane) - row_tiles * groups_.column_tiles);
    const TilePlace place = place_of(in_group, row_tiles, groups_.column_tiles);
    const bool zero = rows_.first() + lane == groups_.E;
    const int32_t terms = zero ? 0 : groups_.terms;
    return {.expert = zero ? kNoExpert : rows_.first() + lane,
            .row = begin + place.row * kRows,
            .end_row = end,
            .column = place.column * kColumns,
            .term = 0,
            .end_term = terms,
            .steps = (terms + kStepTerms - 1) / kStepTerms,
            .first_step = 0,
            .partial = kWhole};
  }

 private:
  static __device__ int32_t tiles_of(int32_t rows) {
    return static_cast<int32_t>((static_cast<uint32_t>(rows) + kRows - 1) / kRows);
  }

  // Where the tiles of the lanes' groups end.
  __device__ void count_tiles() {
    const int32_t tiles_before = end_tile();
    lane_end_tile_ = tiles_of(rows_.end() - rows_.begin()) * groups_.column_tiles;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int32_t before = __shfl_up_sync(kAllLanes, lane_end_tile_, distance);
      if (lane_index() >= distance) lane_end_tile_ += before;
    }
    lane_end_tile_ += tiles_before;
  }

  // Of the groups that have been read.
  __device__ int32_t end_tile() const { return __shfl_sync(kAllLanes, lane_end_tile_, kWarp - 1); }

  RowGroups groups_;
  GroupRows rows_;
  int32_t lane_end_tile_ = 0;
};

}  // namespace anabranch::cuda
