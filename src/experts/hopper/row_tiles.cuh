// Which tiles there are in a product over the rows of groups, whose sizes only the device knows.
#pragma once

#include <cstdint>

#include "core/cuda/warp.cuh"
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

// Tiles in one order for all blocks: expert after expert; within an expert in bands of up to kBandTiles tiles of rows,
// column after column. So the blocks that run at a time share few rows and few columns, which fit the L2 cache.
//
// Used by one whole warp. Lanes hold the groups first_ ... first_ + 31; at() moves them on.
template <int kRows, int kColumns>
class RowTiles {
 public:
  __device__ explicit RowTiles(const RowGroups& groups) : groups_(groups) { read_groups(); }

  // The index-th tile; indices must not decrease from call to call.
  __device__ Tile at(int32_t index) {
    while (index >= end_tile_) {
      if (first_ + kWarp > groups_.E) return {.expert = kNoTile};
      first_ += kWarp;
      read_groups();
    }
    const unsigned ends_later = __ballot_sync(kAllLanes, index < lane_end_tile_);
    const int lane = __ffs(static_cast<int>(ends_later)) - 1;
    const int32_t begin = __shfl_sync(kAllLanes, lane_begin_, lane);
    const int32_t end = __shfl_sync(kAllLanes, lane_end_, lane);
    const int32_t row_tiles = tiles_of(end - begin);
    const int32_t in_group = index - (__shfl_sync(kAllLanes, lane_end_tile_, lane) - row_tiles * groups_.column_tiles);
    const int32_t bands = (row_tiles + kBandTiles - 1) / kBandTiles;
    const int32_t band_rows = (row_tiles + bands - 1) / bands;
    const int32_t band = in_group / (band_rows * groups_.column_tiles);
    const int32_t in_band = in_group - band * band_rows * groups_.column_tiles;
    const int32_t height = min(band_rows, row_tiles - band * band_rows);
    const bool zero = first_ + lane == groups_.E;
    return {.expert = zero ? kNoExpert : first_ + lane,
            .row = begin + (band * band_rows + in_band % height) * kRows,
            .end_row = end,
            .column = in_band / height * kColumns,
            .term = 0,
            .end_term = groups_.terms,
            .steps = zero ? 0 : (groups_.terms + kStepTerms - 1) / kStepTerms,
            .first_step = 0};
  }

 private:
  static constexpr int32_t kBandTiles = 16;

  static __device__ int32_t tiles_of(int32_t rows) {
    return static_cast<int32_t>((static_cast<uint32_t>(rows) + kRows - 1) / kRows);
  }

  // Groups first_ ...: where their rows and tiles end. The rows past all groups are group E.
  __device__ void read_groups() {
    const auto R = static_cast<uint32_t>(groups_.R);
    const int32_t group = first_ + lane_index();
    uint32_t size = group == groups_.E ? R : 0;
    if (group < groups_.E) size = static_cast<uint32_t>(min(max(groups_.sizes[group], 0), groups_.R));
    uint32_t end = min(size + (lane_index() == 0 ? static_cast<uint32_t>(end_row_) : 0u), R);
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const uint32_t before = __shfl_up_sync(kAllLanes, end, distance);
      if (lane_index() >= distance) end = min(end + before, R);  // both at most R < 2^31
    }
    const uint32_t begin = __shfl_up_sync(kAllLanes, end, 1);
    lane_begin_ = lane_index() == 0 ? end_row_ : static_cast<int32_t>(begin);
    lane_end_ = static_cast<int32_t>(end);
    lane_end_tile_ = tiles_of(lane_end_ - lane_begin_) * groups_.column_tiles;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int32_t before = __shfl_up_sync(kAllLanes, lane_end_tile_, distance);
      if (lane_index() >= distance) lane_end_tile_ += before;
    }
    lane_end_tile_ += end_tile_;
    end_tile_ = __shfl_sync(kAllLanes, lane_end_tile_, kWarp - 1);
    end_row_ = __shfl_sync(kAllLanes, lane_end_, kWarp - 1);
  }

  RowGroups groups_;
  int32_t first_ = 0;
  int32_t end_row_ = 0;  // of the groups that have been read
  int32_t end_tile_ = 0;
  int32_t lane_begin_ = 0;  // rows of the lane's group
  int32_t lane_end_ = 0;
  int32_t lane_end_tile_ = 0;
};

}  // namespace anabranch::cuda
