// Which tiles there are in a product over terms: those of every segment's result, as segments.h lists them.
#pragma once

#include <cstdint>

#include "core/cuda/warp.cuh"
#include "experts/hopper/segments.h"
#include "experts/hopper/tile.cuh"

namespace anabranch::cuda {

struct SegmentGroups {
  SegmentList list;
  int32_t rows;  // of a result
  int32_t row_tiles;
  int32_t column_tiles;
};

// Segment after segment, within a segment as in place_of(). Segments take very different times: a block takes a tile
// when it is ready for one. Used by one whole warp.
template <int kRows, int kColumns>
class SegmentTiles {
 public:
  __device__ explicit SegmentTiles(const SegmentGroups& groups)
      : groups_(groups), segments_(groups.list.counts->segments) {}

  __device__ Tile next(int) {
    const int32_t index = __shfl_sync(kAllLanes, next_, 0);
    const int32_t tiles = groups_.row_tiles * groups_.column_tiles;
    const int32_t segment_index = index / tiles;
    if (segment_index >= segments_) return {.expert = kNoTile};
    const Segment segment = groups_.list.segments[segment_index];
    // What comes next is known when it is asked for.
    if (lane_index() == 0) next_ = static_cast<int32_t>(gridDim.x) + atomicAdd(&groups_.list.counts->next_tile, 1);
    const TilePlace place = place_of(index - segment_index * tiles, groups_.row_tiles, groups_.column_tiles);
    return {.expert = segment.expert,
            .row = place.row * kRows,
            .end_row = groups_.rows,
            .column = place.column * kColumns,
            .term = segment.begin,
            .end_term = segment.end,
            .steps = (segment.end - segment.begin + kStepTerms - 1) / kStepTerms,
            .first_step = 0,
            .partial = segment.partial};
  }

 private:
  const SegmentGroups& groups_;
  int32_t segments_;
  int32_t next_ = static_cast<int32_t>(blockIdx.x);  // in lane 0
};

}  // namespace anabranch::cuda
