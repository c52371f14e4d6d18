// The generic forward kernel: any K and any number of experts that fit in shared memory; one warp per token, one expert
// per lane at a time.
#pragma once

#include "core/cuda/dynamic_memory.cuh"
#include "router/cuda/block.cuh"
#include "router/cuda/outputs.cuh"
#include "router/cuda/row.cuh"
#include "router/cuda/select.cuh"

namespace anabranch::cuda {
namespace {

__global__ void __launch_bounds__(kMaxWarps* kWarp, kBlocks) route_generic(const __grid_constant__ RouteCall call) {
  char* const shared = dynamic_shared_array<char>();
  const RouterForward& op = call.op;
  const int E = static_cast<int>(op.E);
  char* const warp_memory = shared + call.shared.first_warp + warp_index() * call.shared.warp;
  int32_t* const counts = reinterpret_cast<int32_t*>(shared + call.shared.counts);
  const Slots slots{reinterpret_cast<int32_t*>(warp_memory + call.shared.experts),
                    reinterpret_cast<float*>(warp_memory + call.shared.values), op.K};
  const SelectionScratch scratch{reinterpret_cast<uint32_t*>(warp_memory + call.shared.keys),
                                 reinterpret_cast<uint32_t*>(warp_memory + call.shared.groups)};
  const unsigned memory = static_cast<unsigned>(__cvta_generic_to_shared(warp_memory));
  const Outputs outputs{op, SharedArray<int32_t>(slots.experts), SharedArray<float>(slots.values),
                        memory + call.shared.rows, memory + call.shared.map};
  let_next_kernel_start();
  clear_counts(call, shared);
  wait_for_previous_kernel();
  BiasReader bias(op);
  bias.read();
  bias.store(reinterpret_cast<float*>(shared + call.shared.bias), [](unsigned e) { return e; });
  if (call.scales != nullptr) clear_histogram(op);
  outputs.clear_map(1);
  const int lane = lane_index();
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const bool is_softmax = op.score_function == AB_SOFTMAX;
  Selection selection = call.selection;
  selection.ranks = op.K;  // `slots` has no space for more
  float* sums = reinterpret_cast<float*>(warp_memory + call.shared.sums);
  for (int e = lane; op.score_sum != nullptr && e < E; e += kWarp) sums[e] = 0.0f;
  __syncthreads();

  const int64_t end = call.tiles.end(blockIdx.x);
  for (int64_t t = call.tiles.begin(blockIdx.x) + warp_index(); t < end; t += warps) {
    const bool unmasked = op.token_mask == nullptr || op.token_mask[t] != 0;
    const auto logit = [&](int e) { return load_float(op.logits, op.logits_dtype, t * op.E + e); };
    RowSoftmax softmax{0.0f, 1.0f};
    float nan_or_zero = 0.0f;
    if (unmasked && (is_softmax || op.lse != nullptr)) {
      float top = -INFINITY;
      for (int e = lane; e < E; e += kWarp) top = fmaxf(top, logit(e));
      top = max_lanes<kWarp>(top);
      softmax.shift = top * kLog2E;
      float sum = 0.0f;
      for (int e = lane; e < E; e += kWarp) sum += softmax.power(logit(e));
      sum = sum_lanes<kWarp>(sum);
      softmax.factor = reciprocal(sum);
      nan_or_zero = sum - sum;
      if (op.lse != nullptr && lane == 0) op.lse[t] = top + log_f32(sum);
    } else if (op.lse != nullptr && lane == 0) {
      op.lse[t] = 0.0f;
    }
    if (op.needs_selection) {
      if (unmasked && !op.forced) {
        select_exactly(op, selection, t, softmax, scratch, slots.experts);
      } else {
        for (int k = lane; k < op.K; k += kWarp) slots.experts[k] = unmasked ? forced_expert(op, t, k) : -1;
      }
      __syncwarp();
      if (call.scales != nullptr) {
        uint32_t next = 0;  // the best of the remaining keys
        if (unmasked) extract_largest(scratch.keys, 0, E, &next);
        if (lane == 0) call.scales[t] = {unmasked ? from_ordered_bits(next) : NAN, softmax.shift, softmax.factor};
      }
      for_own_slots<kWarp>(slots, lane, [&](int k, int expert) {
        slots.values[k] = logit(expert);
        if (op.tokens_per_expert != nullptr) atomicAdd(counts + expert, 1);
      });
      if (op.needs_weights) {
        score_slots<kWarp>(op.score_function, op.normalize, softmax, nan_or_zero, slots, lane);
        for (int k = lane; k < op.K; k += kWarp) {
          slots.values[k] = slots.experts[k] < 0 ? 0.0f : slots.values[k] * op.scaling_factor;
        }
      }
      if (op.probs != nullptr) outputs.clear_probs(1);
      __syncwarp();
      const auto token = static_cast<unsigned>(t);
      outputs.write_slots(token, 1);
      for_own_slots<kWarp>(slots, lane, [&](int k, int expert) {
        if (op.probs != nullptr) outputs.scatter_weight(0, static_cast<unsigned>(expert), slots.values[k]);
        if (outputs.has_map()) outputs.mark(0, static_cast<unsigned>(expert));
      });
      __syncwarp();
      if (op.probs != nullptr) outputs.write_probs(token, 1);
      if (outputs.has_map()) {
        outputs.write_map(token, 1);
        __syncwarp();
        for_own_slots<kWarp>(slots, lane, [&](int, int expert) { outputs.unmark(0, static_cast<unsigned>(expert)); });
      }
      __syncwarp();
    }
    if (op.score_sum != nullptr || op.aux_scores != nullptr) {
      const auto score = [&](float z) {
        return is_softmax ? softmax.power(z) : elementwise_score(op.score_function, z);
      };
      float factor = softmax.factor;
      if (!is_softmax) {
        float total = 0.0f;
        for (int e = lane; unmasked && e < E; e += kWarp) total += score(logit(e));
        factor = reciprocal(sum_lanes<kWarp>(total) + kSumEpsilon);
      }
      for (int e = lane; e < E; e += kWarp) {
        const float a = unmasked ? score(logit(e)) * factor : 0.0f;
        if (op.score_sum != nullptr) sums[e] += a;
        if (op.aux_scores != nullptr) op.aux_scores[t * op.E + e] = a;
      }
    }
  }

  __syncwarp();
  for (int e = lane; op.score_sum != nullptr && e < E; e += kWarp) {
    reinterpret_cast<float*>(warp_memory + call.shared.keys)[e] = sums[e];
  }
  end_block(call, shared);
}

}  // namespace
}  // namespace anabranch::cuda
