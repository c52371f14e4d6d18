// The sums of a weight gradient run over the rows of a group. Long groups are cut into segments whose sums are computed
// apart and added afterwards in their order, so that no group keeps one block busy for long and results are the same
// bits on every run. How groups are cut depends on their sizes and on static shapes alone.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "anabranch/types.h"
#include "experts/cuda/tiles/groups.h"

namespace anabranch::cuda {

// Rows [begin, end) of an expert, none for an expert without rows.
struct alignas(16) Segment {
  int32_t expert;
  int32_t begin;
  int32_t end;
  int32_t partial;  // the partial result it gives; kWhole: it is all of the expert's rows
};

// An expert of several segments: its partial results are first, ..., first + count - 1.
struct Split {
  int32_t expert;
  int32_t first;
  int32_t count;
};

struct SegmentCounts {
  int32_t segments;
  int32_t splits;
  int32_t next_tile;  // the tiles that blocks have taken, beside one each
};

// Bounds from shapes.
struct SegmentBounds {
  int64_t rows;      // of a segment, a multiple of 64
  int64_t segments;  // one for each expert at least
  int64_t partials;  // 0: no group can be so long
};

// Gradients [E, D, N] of R rows in groups.
SegmentBounds bound_segments(int64_t R, int64_t E, int64_t D, int64_t N);

// On the device, in the workspace.
struct SegmentList {
  SegmentCounts* counts;
  Segment* segments;  // longest first
  Split* splits;
  float* partials;  // [partials, D, N]
};

// Bytes of the workspace; and where things are in it, from a 16-byte aligned address on.
size_t size_of_segments(const SegmentBounds& bounds, int64_t D, int64_t N);
SegmentList place_segments(const SegmentBounds& bounds, void* workspace);

// Enqueues filling the list.
ab_status find_segments(const Groups& groups, const SegmentBounds& bounds, const SegmentList& list,
                        cudaStream_t stream);

// Enqueues out [E, D, N] = the sum of the partial results for the experts of several segments, plus what stood in `out`
// if it accumulates. D * N a multiple of 8, out 16-byte aligned.
ab_status add_partials(const SegmentList& list, int64_t elements, void* out, int32_t dtype, bool accumulates,
                       int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
