// ab_cuda_expand_row_id_map: one warp per token.
#include "anabranch/cuda.h"
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "dispatch/check.h"
#include "dispatch/columns.cuh"

namespace anabranch::cuda {
namespace {

constexpr int64_t kMaxClearing = 2048;  // blocks that clear rows

__global__ void __launch_bounds__(PartsBlock::kThreads) clear_slots(const Maps maps) {
  let_next_kernel_start();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * PartsBlock::kThreads + threadIdx.x; row < maps.R;
       row += static_cast<int64_t>(gridDim.x) * PartsBlock::kThreads) {
    maps.slot_of_row[row] = -1;
  }
}

__global__ void __launch_bounds__(PartsBlock::kThreads) expand_tokens(const RowIdMap map) {
  const Maps& maps = map.maps;
  const unsigned E = static_cast<unsigned>(maps.K);
  const unsigned lane = static_cast<unsigned>(lane_index());
  const int64_t t = static_cast<int64_t>(blockIdx.x) * PartsBlock::kWarps + warp_index();
  if (t >= maps.T) return;
  const int32_t* ids = map.ids + t * (2 * maps.K + 1);
  const int32_t* experts = ids + E;
  // Read before the wait: the kernels before clear_slots have ended, so L2 holds what they wrote.
  const unsigned n = static_cast<unsigned>(std::clamp<int64_t>(__ldcg(experts + E), 0, maps.K));
  int32_t* rows = maps.row_of_slot + t * E;
  for (unsigned e = lane; e < E; e += kWarp) rows[e] = -1;
  for (unsigned first = 0; first < n; first += kWarp) {
    const unsigned i = first + lane;
    const int32_t named = i < n ? __ldcg(experts + i) : -1;
    const int32_t expert = Maps::is_index(named, E) ? named : -1;
    // If an expert is named twice, the last entry wins.
    const unsigned same = __match_any_sync(kAllLanes, expert);
    __syncwarp();
    if (expert >= 0 && same >> lane == 1) rows[expert] = map.row(__ldcg(ids + i), expert);
  }
  __syncwarp();
  wait_for_previous_kernel();  // no kernel overlaps the beginning of clear_slots, so writing rows earlier is safe
  for (unsigned i = lane; i < n; i += kWarp) {
    if (!Maps::is_index(experts[i], E)) continue;
    const int32_t row = rows[experts[i]];
    if (row >= 0) atomicMax(maps.slot_of_row + row, static_cast<int32_t>(t * E) + experts[i]);
  }
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" ab_status ab_cuda_expand_row_id_map(const ab_expand_row_id_map_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  RowIdMap map;
  AB_RETURN_IF_ERROR(check_expand_row_id_map(args, &map));
  const cudaStream_t stream = cuda::stream_of(exec);
  const int64_t clearing =
      std::min((map.maps.R + cuda::PartsBlock::kThreads - 1) / cuda::PartsBlock::kThreads, cuda::kMaxClearing);
  AB_RETURN_IF_ERROR(cuda::launch("expand_row_id_map: clear_slots", cuda::clear_slots,
                                  {clearing, cuda::PartsBlock::kThreads, 0, stream}, map.maps));
  const int64_t blocks = (map.maps.T + cuda::PartsBlock::kWarps - 1) / cuda::PartsBlock::kWarps;
  return cuda::launch("expand_row_id_map: expand_tokens", cuda::expand_tokens,
                      {blocks, cuda::PartsBlock::kThreads, 0, stream, clearing > 0}, map);
}
