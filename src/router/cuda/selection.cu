// Converts the selection of a forward pass to [T, K] int32 indices, from indices of another width or from a map; one
// warp per token.
#include "core/cuda/launch.h"
#include "core/cuda/warp.cuh"
#include "router/cuda/backward.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kWarps = 8;  // per block

// Lists the experts of a map's row in ascending order, at most K.
template <class IsSelected>
__device__ void read_map(int64_t E, int K, const IsSelected& is_selected, int32_t* experts) {
  const unsigned before = (1u << lane_index()) - 1u;  // mask of the lanes with lower experts
  int count = 0;
#pragma unroll 4
  for (int64_t first = 0; first < E; first += kWarp) {
    const int64_t e = first + lane_index();
    const bool selected = e < E && is_selected(e);
    const unsigned all = __ballot_sync(kAllLanes, selected);
    const int k = count + __popc(all & before);
    if (selected && k < K) experts[k] = static_cast<int32_t>(e);
    count += __popc(all);
  }
  for (int k = count + lane_index(); k < K; k += kWarp) experts[k] = -1;
}

template <class Index>
__device__ void read_indices(const Index* indices, int64_t E, int K, int32_t* experts) {
  for (int k = lane_index(); k < K; k += kWarp) {
    const Index e = indices[k];
    experts[k] = e >= 0 && e < E ? static_cast<int32_t>(e) : -1;
  }
}

__global__ void __launch_bounds__(kWarps* kWarp)
    read_selection(const __grid_constant__ RouterBackward op, int32_t* experts) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + warp_index();
  if (t >= op.T) return;
  int32_t* const to = experts + t * op.K;
  const void* const given = op.selection.data;
  if (op.selection.format == MapFormat::bytes) {
    const uint8_t* const row = static_cast<const uint8_t*>(given) + t * op.E;
    read_map(op.E, op.K, [row](int64_t e) { return row[e] != 0; }, to);
  } else if (op.selection.format == MapFormat::bits) {
    const uint8_t* const row = static_cast<const uint8_t*>(given) + t * ((op.E + 7) / 8);
    read_map(op.E, op.K, [row](int64_t e) { return (row[e / 8] >> e % 8 & 1) != 0; }, to);
  } else if (op.selection.dtype == AB_INT16) {
    read_indices(static_cast<const int16_t*>(given) + t * op.K, op.E, op.K, to);
  } else if (op.selection.dtype == AB_INT64) {
    read_indices(static_cast<const int64_t*>(given) + t * op.K, op.E, op.K, to);
  } else {
    read_indices(static_cast<const int32_t*>(given) + t * op.K, op.E, op.K, to);
  }
}

}  // namespace

ab_status launch_read_selection(const RouterBackward& op, int32_t* experts, cudaStream_t stream) {
  const int64_t blocks = (op.T + kWarps - 1) / kWarps;
  return launch("router selection", read_selection, {blocks, kWarps * kWarp, 0, stream, true}, op, experts);
}

}  // namespace anabranch::cuda
