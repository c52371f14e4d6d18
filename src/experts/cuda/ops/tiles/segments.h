// Segments of weight gradients, whose sums run over the rows of a group. Long groups are split into segments whose sums
// are computed separately and added afterwards in a fixed order. So no group occupies one CTA for long, and results are
// bitwise reproducible. The split depends only on group sizes and static shapes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "core/status.h"
#include "experts/cuda/ops/tiles/groups.h"
#include "experts/cuda/ops/weight_gradient.h"
#include "experts/cuda/ops/workspace_sizes.h"

namespace anabranch::cuda {

// Device pointers into the workspace.
struct SegmentList {
  SegmentCounts* counts;
  int32_t* next_tile;  // of counts
  Segment* segments;   // longest first
  Split* splits;
  float* partials;  // [partials, D, N]
};

// Lays out the list in the workspace, which must be 16-byte aligned. use: the index of the gradient.
SegmentList place_segments(const SegmentBounds& bounds, void* workspace, int use);

// Enqueues the kernel that fills the list.
ab_status find_segments(const Groups& groups, const SegmentBounds& bounds, const SegmentList& list,
                        cudaStream_t stream);

// Enqueues out [E, D, N] = sum of partial sums, for experts with several segments. accumulates: adds to `out`.
ab_status add_segment_sums(const SegmentList& list, int64_t elements, void* out, int32_t dtype, bool accumulates,
                           int multiprocessors, cudaStream_t stream);

// Enqueues a weight gradient. launch(bounds, list) must enqueue the kernel that sums each segment. workspace:
// weight_gradient_bytes(R, E, D, N) bytes.
template <class F>
ab_status sum_in_segments(const WeightGradient& g, void* workspace, int multiprocessors, cudaStream_t stream,
                          const F& launch) {
  const SegmentBounds bounds = bound_segments(g.R, g.E, g.D, g.N);
  const SegmentList list = place_segments(bounds, workspace, g.segment_use);
  if (g.segment_use == 0) {
    AB_RETURN_IF_ERROR(find_segments(groups_of(g.group_sizes, g.E, g.R), bounds, list, stream));
  }
  AB_RETURN_IF_ERROR(launch(bounds, list));
  if (bounds.partials == 0) return ok();
  return add_segment_sums(list, g.D * g.N, g.d_w.data, g.d_w.dtype, g.accumulates, multiprocessors, stream);
}

}  // namespace anabranch::cuda
