#include "dispatch/plan_few.h"

#include <algorithm>

#include "core/cuda/block_sum.cuh"
#include "core/cuda/dynamic_memory.cuh"
#include "core/cuda/launch.h"
#include "dispatch/lanes_with_same.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kMostSlots = 4096;
constexpr int kMostRows = 4 * kMostSlots;
constexpr int kLeastWarps = 8;
constexpr int kMostWarps = 32;
constexpr int kMostCounters = 12 << 10;

// Warps take neighbouring slots each.
struct FewSlots {
  PlanCall call;
  int slots = 0;
  int rows = 0;
  int E = 0;
  int slots_per_warp = 0;  // a multiple of 32
  int expert_bits = 0;
};

int warps_of(int64_t slots) {
  return static_cast<int>(std::clamp<int64_t>((slots + kWarp - 1) / kWarp, kLeastWarps, kMostWarps));
}

// The code takes longer to arrive from memory than to run, where the weights of other layers have driven it out of the
// caches: there is little of it, and loops are not unrolled.
__global__ void __launch_bounds__(kMostWarps* kWarp, 1) place_few_slots(const FewSlots few) {
  int32_t* const starts = &dynamic_shared_memory<int32_t>();  // [E] of experts
  const PlanCall& call = few.call;
  const auto thread = static_cast<int>(threadIdx.x);
  const auto threads = static_cast<int>(blockDim.x);
  int32_t* const counters = starts + few.E;  // [warps][E] slots of each warp, then those of the warps before
  const int counts = threads / kWarp * few.E;
  int32_t* const own = counters + warp_index() * few.E;
  int32_t* const experts = counters + counts;  // [slots]
  int32_t* const ranks = experts + few.slots;  // [slots] among those of the same expert and warp
#pragma unroll 1
  for (int i = thread; i < counts; i += threads) counters[i] = 0;
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();

  const int begin = warp_index() * few.slots_per_warp + lane_index();
  const int end = min(begin - lane_index() + few.slots_per_warp, few.slots);
  int32_t invalid = 0;
#pragma unroll 1
  for (int slot = begin; slot - lane_index() < end; slot += kWarp) {
    int32_t expert = slot < end ? call.entry<int32_t>(slot) : -1;
    if (expert < -1 || expert >= few.E) {
      expert = -1;
      ++invalid;
    }
    const unsigned same = lanes_with_same(expert, few.expert_bits);
    const unsigned before = same & ((1u << lane_index()) - 1u);
    const int32_t rank = expert >= 0 ? own[expert] : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) own[expert] = rank + __popc(same);
    __syncwarp();
    if (slot < end) {
      experts[slot] = expert;
      ranks[slot] = rank + __popc(before);
    }
  }
  __syncthreads();

  int32_t placed = 0;
#pragma unroll 1
  for (int first = 0; first < few.E; first += threads) {
    const int e = first + thread;
    int32_t count = 0;
#pragma unroll 1
    for (int i = e; e < few.E && i < counts; i += few.E) {
      const int32_t of_warp = counters[i];
      counters[i] = count;
      count += of_warp;
    }
    int32_t total;
    const int32_t start = placed + sum_before(count, &total);
    placed += total;
    if (e >= few.E) continue;
    starts[e] = start;
    if (call.tokens_per_expert != nullptr) call.tokens_per_expert[e] = count;
    if (call.group_sizes != nullptr) call.group_sizes[e] = min(start + count, few.rows) - min(start, few.rows);
    if (call.offsets != nullptr) call.offsets[e] = min(start, few.rows);
  }
  sum_before(invalid, &invalid);
  if (thread == 0 && call.offsets != nullptr) call.offsets[few.E] = min(placed, few.rows);
  if (thread == 0 && call.dropped != nullptr) *call.dropped = invalid + max(placed - few.rows, 0);
  __syncthreads();

#pragma unroll 1
  for (int slot = begin; slot < end; slot += kWarp) {
    const int32_t expert = experts[slot];
    int32_t row = -1;
    if (expert >= 0) row = starts[expert] + own[expert] + ranks[slot];
    if (row >= few.rows) row = -1;
    if (row >= 0) call.maps.slot_of_row[row] = slot;
    if (call.maps.row_of_slot != nullptr) call.maps.row_of_slot[slot] = row;
  }
#pragma unroll 1
  for (int row = placed + thread; row < few.rows; row += threads) call.maps.slot_of_row[row] = -1;
}

}  // namespace

bool is_few(const PlanCall& call) {
  const int64_t slots = call.maps.T * call.maps.K;
  return call.format == SlotFormat::experts && call.row_id_map == nullptr && call.regions.experts == call.E &&
         call.regions.align == 1 && slots <= kMostSlots && call.regions.rows <= kMostRows &&
         warps_of(slots) * call.E <= kMostCounters;
}

ab_status plan_few(const PlanCall& call, int expert_bits, cudaStream_t stream) {
  FewSlots few;
  few.call = call;
  few.slots = static_cast<int>(call.maps.T * call.maps.K);
  few.rows = static_cast<int>(call.regions.rows);
  few.E = static_cast<int>(call.E);
  few.expert_bits = expert_bits;
  const int warps = warps_of(few.slots);
  few.slots_per_warp = (few.slots + warps * kWarp - 1) / (warps * kWarp) * kWarp;
  const size_t shared = static_cast<size_t>((1 + warps) * few.E + 2 * few.slots) * sizeof(int32_t);
  return launch("plan", place_few_slots, {1, warps * kWarp, shared, stream, true}, few);
}

}  // namespace anabranch::cuda
