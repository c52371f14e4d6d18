// The tile scheduler of gradients of weights: the tiles of every segment's result, as segments.h lists them.
#pragma once

#include <cstdint>

#include "core/cuda/warp.cuh"
#include "experts/cuda/ops/tiles/segments.h"
#include "experts/cuda/ops/tiles/tile.cuh"

namespace anabranch::cuda {

struct SegmentTiles {
  SegmentList list;
  int32_t rows;  // of a result
  int32_t row_tiles;
  int32_t column_tiles;
};

// Segment after segment, within a segment as in place_of(). Segments take very different times: a block takes a tile
// when it is ready for one. Used by one whole warp.
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
    // What comes next is known when it is asked for.
    if (lane_index() == 0) next_ = static_cast<int32_t>(gridDim.x) + atomicAdd(&tiles_.list.counts->next_tile, 1);
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
  int32_t next_ = static_cast<int32_t>(blockIdx.x);  // in lane 0
};

}  // namespace anabranch::cuda
