// Tile scheduler of GEMMs over the rows of groups.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda/cluster.cuh"
#include "experts/cuda/ops/row_part.h"
#include "experts/cuda/ops/tiles/group_bounds.cuh"
#include "experts/cuda/ops/tiles/tile.cuh"

namespace anabranch::cuda {

// The result out[R, columns] of a GEMM over groups of rows.
struct RowTiles {
  Groups groups;
  int32_t k;  // length of the contraction: columns of operand A
  int32_t column_tiles;
  bool skips_rest = false;  // omit tiles of the rows after the groups
};

// Only the tiles of a part of the rows.
struct PartOfRowTiles : RowTiles {
  RowPart part;
};

// Lists tiles in the same order for all CTAs: by expert, and within an expert by place_of(). Used by one whole warp.
//
// A cluster of two CTAs takes pairs of tiles, one below the other, and multicasts their weights. If a last row of tiles
// remains, its tiles are paired with their horizontal neighbours; the second tile of the last pair may be out of bounds
// and then has no rows. Without clusters a pair is a single tile.
template <int kRows, int kColumns, int kBlocks = 1, class Tiles = RowTiles>
class RowTileScheduler {
  static_assert(kBlocks == 1 || kBlocks == 2, "a cluster has one or two CTAs");

 public:
  __device__ explicit RowTileScheduler(const Tiles& tiles) : tiles_(tiles), bounds_(tiles.groups) { count_pairs(); }

  // Returns the CTA's n-th tile. Must be called for consecutive n; clusters take pairs in turn.
  __device__ Tile next(int n) {
    return at(static_cast<int32_t>(blockIdx.x) / kBlocks + n * (static_cast<int32_t>(gridDim.x) / kBlocks));
  }

  // Returns the CTA's tile of the index-th pair. Indices must not decrease between calls.
  __device__ Tile at(int32_t index) {
    while (index >= end_pair()) {
      if (bounds_.first() + kWarp > tiles_.groups.E) return {.expert = kNoTile};
      bounds_.move_on();
      count_pairs();
    }
    const unsigned ends_later = __ballot_sync(kAllLanes, index < lane_end_pair_);
    const int lane = __ffs(static_cast<int>(ends_later)) - 1;
    const PartOfGroup part = part_of(bounds_.first() + lane, __shfl_sync(kAllLanes, bounds_.begin(), lane),
                                     __shfl_sync(kAllLanes, bounds_.end(), lane));
    const int32_t row_tiles = tiles_of(part.end - part.begin) - part.omitted;
    const int32_t in_group = index - (__shfl_sync(kAllLanes, lane_end_pair_, lane) - pairs_of(row_tiles));
    const int32_t multicasting = row_tiles / kBlocks * tiles_.column_tiles;
    const auto block = static_cast<int32_t>(block_in_cluster<kBlocks>());
    TilePlace place;
    if (kBlocks == 1 || in_group < multicasting) {
      place = place_of<kBandTiles / kBlocks>(in_group, row_tiles / kBlocks, tiles_.column_tiles);
      place.row = place.row * kBlocks + block;
    } else {
      place = {row_tiles - 1, (in_group - multicasting) * kBlocks + block};
    }
    if (place.row >= part.first_omitted) place.row += part.omitted;
    const bool zero = bounds_.first() + lane == tiles_.groups.E;
    const int32_t k = zero ? 0 : tiles_.k;
    const int32_t row = part.begin + place.row * kRows;
    return {.expert = zero ? kNoExpert : bounds_.first() + lane,
            .row = row,
            .end_row = place.column < tiles_.column_tiles ? part.end : row,
            .column = place.column * kColumns,
            .k = 0,
            .end_k = k,
            .k_blocks = (k + kBlockK - 1) / kBlockK,
            .first_k_block = 0,
            .partial = kWhole,
            .multicasts_b = in_group < multicasting};
  }

 private:
  static __device__ int32_t tiles_of(int32_t rows) {
    return static_cast<int32_t>((static_cast<uint32_t>(rows) + kRows - 1) / kRows);
  }

  __device__ int32_t pairs_of(int32_t row_tiles) const {
    const int32_t last_row = row_tiles % kBlocks == 0 ? 0 : (tiles_.column_tiles + kBlocks - 1) / kBlocks;
    return row_tiles / kBlocks * tiles_.column_tiles + last_row;
  }

  // The rows of a group that belong to the part, and tiles between them that are omitted.
  struct PartOfGroup {
    int32_t begin;
    int32_t end;
    int32_t first_omitted;
    int32_t omitted;
  };
  __device__ PartOfGroup part_of(int32_t group, int32_t begin, int32_t end) const {
    if constexpr (std::is_same_v<Tiles, PartOfRowTiles>) {
      if (group >= tiles_.groups.E) return {begin, end, 0, 0};
      const int32_t from = min(max(tiles_.part.bounds[2 * group], begin), end);
      const int32_t to = min(max(tiles_.part.bounds[2 * group + 1], from), end);
      if (tiles_.part.inside) return {from, to, 0, 0};
      const int32_t first = tiles_of(from - begin);
      return {begin, end, first, tiles_of(end - begin) - first - tiles_of(end - to)};
    } else {
      return {begin, end, 0, 0};
    }
  }

  // Computes where the pairs of the lanes' groups end.
  __device__ void count_pairs() {
    const int32_t pairs_before = end_pair();
    const Groups& groups = tiles_.groups;
    const int32_t group = bounds_.first() + lane_index();
    const bool skipped = (tiles_.skips_rest && group == groups.E) || group < groups.first || group > groups.last;
    const PartOfGroup part = part_of(group, bounds_.begin(), bounds_.end());
    lane_end_pair_ = skipped ? 0 : pairs_of(tiles_of(part.end - part.begin) - part.omitted);
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int32_t before = __shfl_up_sync(kAllLanes, lane_end_pair_, distance);
      if (lane_index() >= distance) lane_end_pair_ += before;
    }
    lane_end_pair_ += pairs_before;
  }

  // End of the pairs of the groups read so far.
  __device__ int32_t end_pair() const { return __shfl_sync(kAllLanes, lane_end_pair_, kWarp - 1); }

  Tiles tiles_;
  GroupBounds bounds_;
  int32_t lane_end_pair_ = 0;
};

}  // namespace anabranch::cuda
