// The sums of a weight gradient run over the rows of a group. Long groups are cut into segments whose sums are computed
// apart and added afterwards in their order, so that no group keeps one block busy for long and results are the same
// bits on every run. How groups are cut depends on their sizes and on static shapes alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "experts/cuda/ops/tiles/groups.h"
#include "experts/cuda/ops/workspace_sizes.h"

namespace anabranch::cuda {

// On the device, in the workspace.
struct SegmentList {
  SegmentCounts* counts;
  Segment* segments;  // longest first
  Split* splits;
  float* partials;  // [partials, D, N]
};

// Where things are in the workspace, from a 16-byte aligned address on.
SegmentList place_segments(const SegmentBounds& bounds, void* workspace);

// Enqueues filling the list.
ab_status find_segments(const Groups& groups, const SegmentBounds& bounds, const SegmentList& list,
                        cudaStream_t stream);

// Enqueues out [E, D, N] = the sum of the partial results for the experts of several segments, plus what stood in `out`
// if it accumulates.
ab_status add_partials(const SegmentList& list, int64_t elements, void* out, int32_t dtype, bool accumulates,
                       int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
