// Tile scheduler of weight gradients: lists the tiles of every segment's result, in the order of segments.h.
#pragma once

#include <cstdint>

#include "core/cuda/warp.cuh"
#include "experts/cuda/ops/tiles/segments.h"
#include "experts/cuda/ops/tiles/tile.cuh"

namespace anabranch::cuda {

struct SegmentTiles {
  SegmentList list;
  int32_t rows;  // per result
  int32_t row_tiles;
  int32_t column_tiles;
};

// Goes through the segments in order, and through the tiles of a segment by place_of(). The time per segment varies
// widely, so CTAs take tiles dynamically. Used by one whole warp.
template <int kRows, int kColumns>
class SegmentTileScheduler {
 public:
  __device__ explicit SegmentTileScheduler(const SegmentTiles& tiles)
      : tiles_(tiles), segments_(tiles.list.counts->segments) {}

  __device__ Tile next(int) {
    const int32_t index = __shfl_sync(kAllLanes, next_, 0);
    const int32_t count = tiles_.row_tiles * tiles_.column_tiles;
    const int32_t segment_index = index / count;
    if (segment_index >= segments_) return {.expert = kNoTile};
    const Segment segment = tiles_.list.segments[segment_index];
    // Take the next tile ahead of time, to hide the latency of the atomic.
    if (lane_index() == 0) next_ = static_cast<int32_t>(gridDim.x) + atomicAdd(tiles_.list.next_tile, 1);
    const TilePlace place = place_of(index - segment_index * count, tiles_.row_tiles, tiles_.column_tiles);
    return {.expert = segment.expert,
            .row = place.row * kRows,
            .end_row = tiles_.rows,
            .column = place.column * kColumns,
            .k = segment.begin,
            .end_k = segment.end,
            .k_blocks = (segment.end - segment.begin + kBlockK - 1) / kBlockK,
            .first_k_block = 0,
            .partial = segment.partial};
  }

 private:
  const SegmentTiles& tiles_;
  int32_t segments_;
  int32_t next_ = static_cast<int32_t>(blockIdx.x);  // valid in lane 0
};

}  // namespace anabranch::cuda
