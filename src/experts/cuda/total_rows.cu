#include "experts/cuda/total_rows.h"

#include "core/cuda/launch.h"
#include "core/cuda/warp.cuh"

namespace anabranch::cuda {
namespace {

// One warp.
__global__ void __launch_bounds__(kWarp)
    add_group_sizes(const int32_t* const group_sizes, const int64_t E, const int64_t R, int32_t* const rows) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int64_t sum = 0;
  for (int64_t e = lane_index(); e < E; e += kWarp) sum += max(group_sizes[e], 0);
  sum = sum_lanes<kWarp>(sum);
  if (lane_index() == 0) *rows = static_cast<int32_t>(min(sum, R));
}

}  // namespace

ab_status count_rows(const int32_t* group_sizes, int64_t E, int64_t R, int32_t* rows, cudaStream_t stream) {
  return launch("count of rows", add_group_sizes, {1, kWarp, 0, stream, true}, group_sizes, E, R, rows);
}

}  // namespace anabranch::cuda
