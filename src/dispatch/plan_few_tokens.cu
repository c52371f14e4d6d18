#include "dispatch/plan_few_tokens.h"

#include <algorithm>

#include "core/cuda/block_sum.cuh"
#include "core/cuda/dynamic_memory.cuh"
#include "core/cuda/launch.h"
#include "dispatch/lanes_with_same.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kMaxSlots = 2048;
constexpr int kMaxRows = 4 * kMaxSlots;
constexpr int kFewWarps = 8;  // a block has up to this many because of its experts or padding rows alone
constexpr int kMaxWarps = 32;
constexpr int kMaxCounters = 12 << 10;

// Each warp processes consecutive slots.
struct SmallPlan {
  PlanCall call;
  int slots = 0;
  int rows = 0;
  int E = 0;
  int slots_per_warp = 0;  // a multiple of 32
  int expert_bits = 0;
};

int num_warps(int64_t slots, int64_t E, int64_t rows) {
  const auto warps = [](int64_t threads) { return (threads + kWarp - 1) / kWarp; };
  const int64_t least = std::clamp<int64_t>(warps(std::max(E, rows - slots)), 1, kFewWarps);
  return static_cast<int>(std::clamp<int64_t>(warps(slots), least, kMaxWarps));
}

// If the weights of other layers have evicted the code from the caches, it takes longer to load the code than to run
// it. So the code is small and loops are not unrolled.
__global__ void __launch_bounds__(kMaxWarps* kWarp, 1) place_small_plan(const SmallPlan plan) {
  int32_t* const starts = &dynamic_shared_memory<int32_t>();  // [E] first row of each expert
  const PlanCall& call = plan.call;
  const auto thread = static_cast<int>(threadIdx.x);
  const auto threads = static_cast<int>(blockDim.x);
  int32_t* const counters = starts + plan.E;  // [warps][E] slots of each warp; later those of the preceding warps
  const int counts = threads / kWarp * plan.E;
  int32_t* const own = counters + warp_index() * plan.E;
  int32_t* const experts = counters + counts;   // [slots]
  int32_t* const ranks = experts + plan.slots;  // [slots] rank within the same expert and warp
#pragma unroll 1
  for (int i = thread; i < counts; i += threads) counters[i] = 0;
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();

  const int begin = warp_index() * plan.slots_per_warp + lane_index();
  const int end = min(begin - lane_index() + plan.slots_per_warp, plan.slots);
  int32_t invalid = 0;
#pragma unroll 1
  for (int slot = begin; slot - lane_index() < end; slot += kWarp) {
    int32_t expert = slot < end ? call.expert_at(slot) : -1;
    if (expert < -1 || expert >= plan.E) {
      expert = -1;
      ++invalid;
    }
    const unsigned same = lanes_with_same(expert, plan.expert_bits);
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
  for (int first = 0; first < plan.E; first += threads) {
    const int e = first + thread;
    int32_t count = 0;
#pragma unroll 1
    for (int i = e; e < plan.E && i < counts; i += plan.E) {
      const int32_t warp_count = counters[i];
      counters[i] = count;
      count += warp_count;
    }
    int32_t total;
    const int32_t start = placed + sum_before(count, &total, min(threads, plan.E + kWarp - 1) / kWarp);
    placed += total;
    if (e >= plan.E) continue;
    starts[e] = start;
    if (call.tokens_per_expert != nullptr) call.tokens_per_expert[e] = count;
    if (call.group_sizes != nullptr) call.group_sizes[e] = min(start + count, plan.rows) - min(start, plan.rows);
    if (call.offsets != nullptr) call.offsets[e] = min(start, plan.rows);
  }
  sum_before(invalid, &invalid);
  if (thread == 0 && call.offsets != nullptr) call.offsets[plan.E] = min(placed, plan.rows);
  if (thread == 0) call.write_dropped(invalid + max(placed - plan.rows, 0));
  __syncthreads();

#pragma unroll 1
  for (int slot = begin; slot < end; slot += kWarp) {
    const int32_t expert = experts[slot];
    int32_t row = -1;
    if (expert >= 0) row = starts[expert] + own[expert] + ranks[slot];
    if (row >= plan.rows) row = -1;
    if (row >= 0) call.maps.slot_of_row[row] = slot;
    if (call.maps.row_of_slot != nullptr) call.maps.row_of_slot[slot] = row;
  }
#pragma unroll 1
  for (int row = placed + thread; row < plan.rows; row += threads) call.maps.slot_of_row[row] = -1;
}

}  // namespace

bool fits_few_tokens(const PlanCall& call) {
  const int64_t slots = call.maps.T * call.maps.K;
  return call.format == SlotFormat::experts && call.row_id_map == nullptr && call.regions.experts == call.E &&
         call.regions.align == 1 && slots <= kMaxSlots && call.regions.rows <= kMaxRows &&
         num_warps(slots, call.E, call.regions.rows) * call.E <= kMaxCounters;
}

ab_status plan_few_tokens(const PlanCall& call, int expert_bits, cudaStream_t stream) {
  SmallPlan plan;
  plan.call = call;
  plan.slots = static_cast<int>(call.maps.T * call.maps.K);
  plan.rows = static_cast<int>(call.regions.rows);
  plan.E = static_cast<int>(call.E);
  plan.expert_bits = expert_bits;
  const int warps = num_warps(plan.slots, plan.E, plan.rows);
  plan.slots_per_warp = (plan.slots + warps * kWarp - 1) / (warps * kWarp) * kWarp;
  const size_t shared = static_cast<size_t>((1 + warps) * plan.E + 2 * plan.slots) * sizeof(int32_t);
  return launch("plan", place_small_plan, {1, warps * kWarp, shared, stream, true}, plan);
}

}  // namespace anabranch::cuda
