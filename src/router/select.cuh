// Selection as the contract says it, for one token by a whole warp, whatever E, K, groups and ties: the row's keys lie
// in shared memory and the largest is taken out K times. The fast ways leave to it what they cannot decide.
#pragma once

#include <cstdint>

#include "core/cuda/element.cuh"
#include "core/cuda/warp.cuh"
#include "router/forward.h"
#include "router/row.cuh"
#include "router/score.h"

namespace anabranch::cuda {

// What experts are selected by.
struct Selection {
  bool by_score = false;         // q = s + b; else q = z
  bool groups_by_score = false;  // group scores add up s + b; else z
  int32_t ranks = 0;             // how many experts are selected
};

inline Selection selection_of(const RouterForward& op) {
  const bool biased = op.bias != nullptr;
  return {biased, !op.groups_by_logits, op.ranks()};
}

// s + b of an expert, -inf where z is.
__device__ __forceinline__ float biased_score(const RouterForward& op, const RowSoftmax& softmax, float z, int expert) {
  const float s =
      op.score_function == AB_SOFTMAX ? softmax.power(z) * softmax.factor : elementwise_score(op.score_function, z);
  const float bias = op.bias == nullptr ? 0.0f : load_float(op.bias, op.bias_dtype, expert);
  return z == -INFINITY ? z : s + bias;
}

// Takes the largest of keys[begin .. end), the first of equals, out (it becomes 0). Returns its index, -1 if all are 0.
// Called, not inlined: every kernel that routes has a copy of this way, which it seldom takes.
static __device__ __noinline__ int take_largest(uint32_t* keys, int begin, int end, uint32_t* value) {
  uint32_t best = 0;
  unsigned at = kAllLanes;
  for (int i = begin + lane_index(); i < end; i += kWarp) {
    if (keys[i] > best) {
      best = keys[i];
      at = static_cast<unsigned>(i);
    }
  }
  *value = __reduce_max_sync(kAllLanes, best);
  if (*value == 0) return -1;
  const int index = static_cast<int>(__reduce_min_sync(kAllLanes, best == *value ? at : kAllLanes));
  if (index % kWarp == (begin + lane_index()) % kWarp) keys[index] = 0;  // by the lane that reads it
  return index;
}

// Scratch memory of a warp.
struct SelectionScratch {
  uint32_t* keys;    // [E]
  uint32_t* groups;  // [num_groups]
};

// keys[e] = what orders expert e of token t, its score or its logit; 0 where its group is left out. groups: 0 for those
// that stay; nullptr: all do.
static __device__ __noinline__ void order_experts(const RouterForward& op, const RowSoftmax& softmax, int64_t t,
                                                  bool by_score, const uint32_t* groups, uint32_t* keys) {
  const int E = static_cast<int>(op.E);
  const int group_size = groups == nullptr ? E : E / op.num_groups;
#pragma unroll 1
  for (int e = lane_index(); e < E; e += kWarp) {
    const float z = load_float(op.logits, op.logits_dtype, t * E + e);
    const bool kept = groups == nullptr || groups[e / group_size] == 0;
    keys[e] = kept ? ordered_bits(by_score ? biased_score(op, softmax, z, e) : z) : 0u;
  }
  __syncwarp();
}

// experts[k] = the k-th expert of token t, for k < selection.ranks.
static __device__ __noinline__ void select_exactly(const RouterForward& op, const Selection& selection, int64_t t,
                                                   const RowSoftmax& softmax, const SelectionScratch& scratch,
                                                   int32_t* experts) {
  const int E = static_cast<int>(op.E);
  uint32_t value;
  __syncwarp();
  if (op.num_groups > 0) {
    const int group_size = E / op.num_groups;
    order_experts(op, softmax, t, selection.groups_by_score, nullptr, scratch.keys);
#pragma unroll 1
    for (int group = 0; group < op.num_groups; ++group) {
      float sum = 0.0f;
#pragma unroll 1
      for (int k = 0; k < op.group_score_topk; ++k) {
        take_largest(scratch.keys, group * group_size, (group + 1) * group_size, &value);
        sum += from_ordered_bits(value);
      }
      if (lane_index() == 0) scratch.groups[group] = ordered_bits(sum);
    }
    __syncwarp();
    // Those that are kept are taken out.
#pragma unroll 1
    for (int kept = 0; kept < op.group_topk; ++kept) take_largest(scratch.groups, 0, op.num_groups, &value);
    __syncwarp();
  }
  order_experts(op, softmax, t, selection.by_score, op.num_groups > 0 ? scratch.groups : nullptr, scratch.keys);
#pragma unroll 1
  for (int k = 0; k < selection.ranks; ++k) {
    const int expert = take_largest(scratch.keys, 0, E, &value);
    if (lane_index() == 0) experts[k] = expert;
  }
  __syncwarp();
}

}  // namespace anabranch::cuda
