// The sums of a weight gradient run over the rows of a group. Long groups are cut into segments whose sums are computed
// apart and added afterwards in their order, so that no group keeps one block busy for long and results are the same
// bits on every run. How groups are cut depends on their sizes and on static shapes alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "core/status.h"
#include "experts/cuda/ops/tiles/groups.h"
#include "experts/cuda/ops/weight_gradient.h"
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

// Enqueues a weight gradient: launch(bounds, list) is to enqueue the kernel that sums each segment. workspace:
// weight_gradient_bytes(R, E, D, N) bytes.
template <class F>
ab_status sum_in_segments(const WeightGradient& g, void* workspace, int multiprocessors, cudaStream_t stream,
                          const F& launch) {
  const SegmentBounds bounds = bound_segments(g.R, g.E, g.D, g.N);
  const SegmentList list = place_segments(bounds, workspace);
  AB_RETURN_IF_ERROR(find_segments(groups_of(g.group_sizes, g.E, g.R), bounds, list, stream));
  AB_RETURN_IF_ERROR(launch(bounds, list));
  if (bounds.partials == 0) return ok();
  return add_partials(list, g.D * g.N, g.d_w.data, g.d_w.dtype, g.accumulates, multiprocessors, stream);
}

}  // namespace anabranch::cuda
