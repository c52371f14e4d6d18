// ab_cuda_plan: a stable counting sort by expert in three kernels, and a fourth for a row_id_map.
//
//   count_slots      each block counts its slots by expert
//   scan_blocks      scans the counts over the blocks: first rows of each block within each expert
//   place_slots      each block places its slots, 32 at a time in order
//   compact_row_ids  compacts the row_id_map of each token, if one is requested
//
// plan_few_tokens.cu handles calls with few tokens in one kernel.
#include "anabranch/cuda.h"
#include "core/cuda/block_sum.cuh"
#include "core/cuda/dynamic_memory.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/warp.cuh"
#include "core/entry.h"
#include "core/range.h"
#include "core/tensor.h"
#include "dispatch/lanes_with_same.cuh"
#include "dispatch/plan.h"
#include "dispatch/plan_few_tokens.h"
#include "dispatch/workspace_sizes.h"

namespace anabranch::cuda {
namespace {

constexpr int kMaxWarps = SlotBlocks::kMaxWarps;
constexpr int kThreads = kMaxWarps * kWarp;

struct Plan {
  PlanCall call;
  int64_t slots = 0;
  SlotBlocks blocks;
  int expert_bits = 0;  // number of bits that distinguish the values of expert_at()
  // workspace
  int32_t* counts = nullptr;  // [blocks, E+1] slots by (block, expert), last: invalid; later an exclusive scan
  int32_t* totals = nullptr;  // [E+1]

  __device__ int64_t first_slot(int64_t block, int warp) const {
    return (block * blocks.warps + warp) * blocks.slots_per_warp;
  }
};

// Number of slots that a thread loads concurrently.
constexpr int kBatch = SlotBlocks::kSlotsPerWarp / kWarp;

// experts[i] = the expert of slot first + i * step: an index in range; -1 for none or a slot past the end; -2 for an
// invalid index.
__device__ __forceinline__ void load_batch(const Plan& plan, int64_t first, int step, int32_t (&experts)[kBatch]) {
  const PlanCall& call = plan.call;
  const auto load = [&](const auto& expert_at) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t slot = first + i * step;
      const int32_t expert = slot < plan.slots ? expert_at(slot) : -1;
      experts[i] = expert >= -1 && expert < call.E ? expert : -2;
    }
  };
  // A loop for each type, so that no branch separates the loads.
  if (call.format != SlotFormat::experts) {
    load([&](int64_t slot) { return call.expert_of(slot / call.maps.K, slot); });
  } else if (call.index_dtype == AB_INT32) {
    load([&](int64_t slot) { return call.expert_at<int32_t>(slot); });
  } else if (call.index_dtype == AB_INT64) {
    load([&](int64_t slot) { return call.expert_at<int64_t>(slot); });
  } else {
    load([&](int64_t slot) { return call.expert_at<int16_t>(slot); });
  }
}

__global__ void __launch_bounds__(kThreads) count_slots(const Plan plan) {
  int32_t* const counters = &dynamic_shared_memory<int32_t>();  // [E+1]
  const int64_t E = plan.call.E;
  for (int64_t e = threadIdx.x; e <= E; e += blockDim.x) counters[e] = 0;
  wait_for_previous_kernel();
  __syncthreads();
  // slots_per_warp is a multiple of kBatch warps.
  const int64_t end = plan.first_slot(blockIdx.x + 1, 0);
  for (int64_t first = plan.first_slot(blockIdx.x, 0) + threadIdx.x; first < end; first += kBatch * blockDim.x) {
    int32_t experts[kBatch];
    load_batch(plan, first, static_cast<int>(blockDim.x), experts);
#pragma unroll
    for (const int32_t expert : experts) {
      if (expert != -1) atomicAdd(counters + (expert >= 0 ? expert : E), 1);
    }
  }
  let_next_kernel_start();  // not before the wait, see place_slots
  __syncthreads();
  int32_t* counts = plan.counts + blockIdx.x * (E + 1);
  for (int64_t e = threadIdx.x; e <= E; e += blockDim.x) counts[e] = counters[e];
}

constexpr int kScanWarps = 32;
constexpr int kScanColumns = 8;  // per block: one 32-byte sector of a row
constexpr int kScanParts = kScanWarps * kWarp / kScanColumns;
constexpr int kScanRows = 4;  // per part, in registers

// A block scans 8 columns, with 8 lanes per row. The blocks of slots are divided into parts of kScanRows consecutive
// ones, which are scanned together.
__global__ void __launch_bounds__(kScanWarps* kWarp) scan_blocks(const Plan plan) {
  __shared__ int32_t sums[kScanWarps][kScanColumns];
  wait_for_previous_kernel();
  let_next_kernel_start();  // not before the wait, see place_slots
  const int64_t columns = plan.call.E + 1;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kScanColumns + lane_index() % kScanColumns;
  const int64_t part = static_cast<int>(threadIdx.x) / kScanColumns;
  int32_t before_all = 0;
  for (int64_t first = 0; first < plan.blocks.count; first += kScanParts * kScanRows) {
    const int64_t begin = first + part * kScanRows;
    int32_t counts[kScanRows];
    int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kScanRows; ++i) {
      const bool in_bounds = begin + i < plan.blocks.count && column < columns;
      counts[i] = in_bounds ? plan.counts[(begin + i) * columns + column] : 0;
      sum += counts[i];
    }
    // Inclusive sum over the parts: first within the warp, then over the preceding warps.
    int32_t through = sum;
#pragma unroll
    for (int distance = kScanColumns; distance < kWarp; distance *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, through, distance);
      if (lane_index() >= distance) through += other;
    }
    if (lane_index() >= kWarp - kScanColumns) sums[warp_index()][lane_index() % kScanColumns] = through;
    __syncthreads();
    int32_t before = before_all + through - sum;
#pragma unroll
    for (int warp = 0; warp < kScanWarps; ++warp) {
      const int32_t warp_count = sums[warp][lane_index() % kScanColumns];
      if (warp < warp_index()) before += warp_count;
      before_all += warp_count;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kScanRows; ++i) {
      if (begin + i < plan.blocks.count && column < columns) plan.counts[(begin + i) * columns + column] = before;
      before += counts[i];
    }
  }
  if (part == 0 && column < columns) plan.totals[column] = before_all;
}

// The first row of each expert: with padding (int64: padding may exceed 2^31 before it is clipped) and without.
struct Starts {
  int64_t* aligned;  // [E], in shared memory
  int32_t* packed;   // [E]
};

__device__ void find_starts(const Plan& plan, const Starts& starts) {
  const int E = static_cast<int>(plan.call.E);
  const Regions& regions = plan.call.regions;
  const int threads = static_cast<int>(blockDim.x);
  const int each = (E + threads - 1) / threads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, E);
  const int end = min(begin + each, E);
  // Sizes in units of align are below 2^31, and so is their total, so one 64-bit scan adds slots and units together.
  const auto align = static_cast<uint32_t>(regions.align);
  const auto aligned_units = [&](int32_t count) {
    return align == 1 ? static_cast<uint32_t>(count) : (static_cast<uint32_t>(count) + align - 1) / align;
  };
  const auto count_and_units = [&](int32_t count) {
    return static_cast<uint64_t>(static_cast<uint32_t>(count)) << 32 | aligned_units(count);
  };
  uint64_t own = 0;
  for (int e = begin; e < end; ++e) own += count_and_units(plan.totals[e]);
  uint64_t total;
  uint64_t before = sum_before(own, &total);
  for (int e = begin; e < end; ++e) {
    starts.packed[e] = static_cast<int32_t>(before >> 32);
    starts.aligned[e] = static_cast<int64_t>(before & 0xffffffffu) * regions.align;
    before += count_and_units(plan.totals[e]);
  }
  __syncthreads();
  if (regions.experts == E) return;
  // Move the experts of each destination to the start of its region: compute the distance first, then the positions.
  for (int region_first = 0; region_first < E; region_first += static_cast<int>(regions.experts)) {
    const int64_t first = starts.aligned[region_first];
    __syncthreads();
    for (int e = region_first + static_cast<int>(threadIdx.x); e < region_first + static_cast<int>(regions.experts);
         e += threads) {
      starts.aligned[e] += regions.begin(e) - first;
    }
  }
  __syncthreads();
}

__device__ void write_sizes(const Plan& plan, const Starts& starts) {
  const PlanCall& call = plan.call;
  const Regions& regions = call.regions;
  const int E = static_cast<int>(call.E);
  int32_t past_end = threadIdx.x == 0 ? plan.totals[E] : 0;
  for (int e = static_cast<int>(threadIdx.x); e < E; e += static_cast<int>(blockDim.x)) {
    const int32_t count = plan.totals[e];
    const int64_t begin = regions.clip(e, starts.aligned[e]);
    const int64_t end = regions.clip(e, starts.aligned[e] + regions.aligned(count));
    past_end += static_cast<int32_t>(count - (regions.clip(e, starts.aligned[e] + count) - begin));
    if (call.tokens_per_expert != nullptr) call.tokens_per_expert[e] = count;
    if (call.group_sizes != nullptr) call.group_sizes[e] = static_cast<int32_t>(end - begin);
    if (call.offsets != nullptr) call.offsets[e] = static_cast<int32_t>(begin);
    if (call.offsets != nullptr && e + 1 == E) call.offsets[E] = static_cast<int32_t>(end);
  }
  uint64_t dropped;
  sum_before(static_cast<uint64_t>(past_end), &dropped);
  if (threadIdx.x == 0) call.write_dropped(static_cast<int32_t>(dropped));
}

// Writes -1 to the rows between an expert's last slot and the next expert, one warp per expert; and, with all threads
// of the grid, from the last expert of a region to its end.
__device__ void fill_padding(const Plan& plan, const Starts& starts) {
  const PlanCall& call = plan.call;
  const Regions& regions = call.regions;
  const auto E = static_cast<int>(call.E);
  const auto experts = static_cast<int>(regions.experts);
  const auto slots_end = [&](int e) { return regions.clip(e, starts.aligned[e] + plan.totals[e]); };
  if (regions.align > 1) {
    const int warps = static_cast<int>(gridDim.x) * plan.blocks.warps;
    for (int e = static_cast<int>(blockIdx.x) * plan.blocks.warps + warp_index(); e < E; e += warps) {
      if ((e + 1) % experts == 0) continue;
      const int64_t end = regions.clip(e, starts.aligned[e + 1]);
      for (int64_t row = slots_end(e) + lane_index(); row < end; row += kWarp) call.maps.slot_of_row[row] = -1;
    }
  }
  for (int e = experts - 1; e < E; e += experts) {
    const int64_t end = regions.end(e);
    const int64_t first = slots_end(e) + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (int64_t row = first; row < end; row += static_cast<int64_t>(gridDim.x) * blockDim.x) {
      call.maps.slot_of_row[row] = -1;
    }
  }
}

// The experts and ranks of the next kBatch * 32 slots of a warp.
struct Ranks {
  int32_t experts[kBatch];
  int32_t ranks[kBatch];
};

// ranks: the number of earlier slots of the warp with the same expert, plus the initial own[expert]. Adds the new slots
// to own[expert].
__device__ __forceinline__ Ranks rank_batch(const Plan& plan, int64_t first, int32_t* own) {
  Ranks batch;
  load_batch(plan, first, kWarp, batch.experts);
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int32_t expert = batch.experts[i];
    const unsigned same = lanes_with_same(expert, plan.expert_bits);
    const int32_t before = expert >= 0 ? own[expert] : 0;
    __syncwarp();
    if (expert >= 0 && lane_index() == __ffs(static_cast<int>(same)) - 1) own[expert] = before + __popc(same);
    __syncwarp();
    batch.ranks[i] = before + __popc(same & ((1u << lane_index()) - 1u));
  }
  return batch;
}

// Reads slots before it waits for the previous kernel. Therefore the kernels before it trigger its start only after
// they have waited for the kernel that wrote the slots. The last block has no slots: it writes the sizes.
__global__ void __launch_bounds__(kThreads) place_slots(const Plan plan) {
  int64_t* const memory = &dynamic_shared_memory<int64_t>();
  const PlanCall& call = plan.call;
  const int E = static_cast<int>(call.E);
  const Starts starts{memory, reinterpret_cast<int32_t*>(memory + E)};
  int32_t* counters = starts.packed + E;  // [warps][E] slots per warp; later exclusive sums
  int32_t* own = counters + warp_index() * E;
  for (int e = lane_index(); e < E; e += kWarp) own[e] = 0;
  __syncwarp();
  constexpr int kBatchSlots = kBatch * kWarp;
  const int64_t begin = plan.first_slot(blockIdx.x, warp_index());
  const int64_t end = min(begin + plan.blocks.slots_per_warp, plan.slots);
  // Rank the slots while the previous kernels still run. A warp with a single batch saves its ranks.
  const Ranks first_ranks = rank_batch(plan, begin + lane_index(), own);
  for (int64_t first = begin + kBatchSlots; first < end; first += kBatchSlots) {
    rank_batch(plan, first + lane_index(), own);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  find_starts(plan, starts);  // its barriers also ensure that all warps have counted
  const bool has_slots = blockIdx.x < plan.blocks.count;
  if (!has_slots) write_sizes(plan, starts);
  for (int e = static_cast<int>(threadIdx.x); has_slots && e < E; e += static_cast<int>(blockDim.x)) {
    int32_t rank = plan.counts[blockIdx.x * (call.E + 1) + e];
    for (int warp = 0; warp < plan.blocks.warps; ++warp) {
      const int32_t count = counters[warp * E + e];
      counters[warp * E + e] = rank;
      rank += count;
    }
  }
  __syncthreads();
  const bool one_region = call.regions.experts == E;
  const auto place = [&](int64_t slot, int32_t expert, int32_t rank) {
    if (slot >= plan.slots) return;
    int32_t row = -1;
    if (expert >= 0) {
      const int64_t at = starts.aligned[expert] + rank;
      if (at < (one_region ? call.regions.rows : call.regions.end(expert))) row = static_cast<int32_t>(at);
    }
    if (row >= 0) call.maps.slot_of_row[row] = static_cast<int32_t>(slot);
    if (call.maps.row_of_slot != nullptr) call.maps.row_of_slot[slot] = row;
    if (call.row_id_map != nullptr) {  // compact_row_ids moves it to its final position
      const int64_t t = slot / E;
      call.row_id_map[t * (2 * call.E + 1) + (slot - t * E)] = expert >= 0 ? starts.packed[expert] + rank : -1;
    }
  };
  if (plan.blocks.slots_per_warp == kBatchSlots) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t expert = first_ranks.experts[i];
      place(begin + i * kWarp + lane_index(), expert, first_ranks.ranks[i] + (expert >= 0 ? own[expert] : 0));
    }
  } else {
    for (int64_t first = begin + lane_index(); first - lane_index() < end; first += kBatchSlots) {
      const Ranks ranks = rank_batch(plan, first, own);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) place(first + i * kWarp, ranks.experts[i], ranks.ranks[i]);
    }
  }
  fill_padding(plan, starts);
}

// One warp per token writes its rows in descending order, then their experts, then their number.
__global__ void __launch_bounds__(kThreads) compact_row_ids(const Plan plan) {
  int32_t* const all_rows = &dynamic_shared_memory<int32_t>();  // [warps][E]
  wait_for_previous_kernel();
  const int E = static_cast<int>(plan.call.E);
  int32_t* rows = all_rows + warp_index() * E;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * warps + warp_index(); t < plan.call.maps.T;
       t += static_cast<int64_t>(gridDim.x) * warps) {
    int32_t* ids = plan.call.row_id_map + t * (2 * plan.call.E + 1);
    for (int e = lane_index(); e < E; e += kWarp) rows[e] = ids[e];
    __syncwarp();
    int n = 0;
    for (int last = E - 1; last >= 0; last -= kWarp) {
      const int e = last - lane_index();
      const int32_t row = e >= 0 ? rows[e] : -1;
      const unsigned routed = __ballot_sync(kAllLanes, row >= 0);
      const int place = n + __popc(routed & ((1u << lane_index()) - 1u));
      if (row >= 0) {
        ids[place] = row;
        ids[E + place] = e;
      }
      n += __popc(routed);
    }
    for (int i = n + lane_index(); i < E; i += kWarp) ids[i] = ids[E + i] = -1;
    if (lane_index() == 0) ids[2 * E] = n;
    __syncwarp();
  }
}

ab_status parse(const ab_plan_args* args, void* workspace, Plan* plan, size_t* bytes) {
  AB_RETURN_IF_ERROR(check_plan(args, &plan->call));
  const int64_t E = plan->call.E;
  if (E > AB_CUDA_MAX_EXPERTS) {
    return error(AB_UNSUPPORTED, "num_experts: got %lld, expected at most %d on CUDA", static_cast<long long>(E),
                 AB_CUDA_MAX_EXPERTS);
  }
  plan->slots = plan->call.maps.T * plan->call.maps.K;
  plan->blocks = SlotBlocks(plan->slots, E);
  while (int64_t{1} << plan->expert_bits < E + 2) ++plan->expert_bits;  // -1 and -2 have the largest bit patterns
  plan->counts = static_cast<int32_t*>(workspace);
  if (workspace != nullptr) plan->totals = plan->counts + plan->blocks.count * (E + 1);
  return report_workspace(plan_bytes(plan->blocks, E), bytes);
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_plan_workspace(const ab_plan_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  cuda::Plan plan;
  return cuda::parse(args, nullptr, &plan, bytes);
}

ab_status ab_cuda_plan(const ab_plan_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::plan);
  cuda::Plan plan;
  size_t bytes = 0;
  AB_RETURN_IF_ERROR(cuda::parse(args, exec->workspace, &plan, &bytes));
  AB_RETURN_IF_ERROR(check_workspace(exec, bytes));
  const cudaStream_t stream = cuda::stream_of(exec);
  if (cuda::fits_few_tokens(plan.call)) return cuda::plan_few_tokens(plan.call, plan.expert_bits, stream);
  const size_t E = static_cast<size_t>(plan.call.E);
  const int threads = plan.blocks.warps * cuda::kWarp;
  AB_RETURN_IF_ERROR(cuda::launch("plan: count_slots", cuda::count_slots,
                                  {plan.blocks.count, threads, (E + 1) * sizeof(int32_t), stream, true}, plan));
  const int64_t strips = (plan.call.E + 1 + cuda::kScanColumns - 1) / cuda::kScanColumns;
  AB_RETURN_IF_ERROR(cuda::launch("plan: scan_blocks", cuda::scan_blocks,
                                  {strips, cuda::kScanWarps * cuda::kWarp, 0, stream, true}, plan));
  const size_t shared = E * (sizeof(int64_t) + (1 + static_cast<size_t>(plan.blocks.warps)) * sizeof(int32_t));
  AB_RETURN_IF_ERROR(cuda::launch("plan: place_slots", cuda::place_slots,
                                  {plan.blocks.count + 1, threads, shared, stream, true}, plan));
  if (plan.call.row_id_map == nullptr) return ok();
  const int warps = plan.call.E <= 1024 ? cuda::kMaxWarps : 4;
  const int64_t blocks = (plan.call.maps.T + warps - 1) / warps;
  return cuda::launch("plan: compact_row_ids", cuda::compact_row_ids,
                      {blocks < 1056 ? blocks : 1056, warps * cuda::kWarp,
                       static_cast<size_t>(warps) * E * sizeof(int32_t), stream, true},
                      plan);
}

}  // extern "C"
