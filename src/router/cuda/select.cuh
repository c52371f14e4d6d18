// Exact selection for one token by a whole warp, for any E, K, groups and ties: the keys of the row are in shared
// memory, and the largest is extracted K times. It handles the tokens that the fast paths cannot decide.
#pragma once

#include <cstdint>

#include "core/cuda/element.cuh"
#include "core/cuda/warp.cuh"
#include "router/cuda/row.cuh"
#include "router/forward.h"
#include "router/score.h"

namespace anabranch::cuda {

// The values by which experts are selected.
struct Selection {
  bool by_score = false;         // q = s + b; else q = z
  bool groups_by_score = false;  // group scores sum s + b; else z
  int32_t ranks = 0;             // number of selected experts
};

inline Selection make_selection(const RouterForward& op) {
  const bool biased = op.bias != nullptr;
  return {biased, !op.groups_by_logits, op.ranks()};
}

// s + b of an expert; -inf if z = -inf.
__device__ __forceinline__ float biased_score(const RouterForward& op, const RowSoftmax& softmax, float z, float bias) {
  const float s =
      op.score_function == AB_SOFTMAX ? softmax.power(z) * softmax.factor : elementwise_score(op.score_function, z);
  return z == -INFINITY ? z : s + bias;
}

// Extracts the largest of keys[begin .. end), the first of equal ones, and sets it to 0. Returns its index, or -1 if
// all are 0. Not inlined: every routing kernel contains this rarely used path.
static __device__ __noinline__ int extract_largest(uint32_t* keys, int begin, int end, uint32_t* value) {
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
  if (index % kWarp == (begin + lane_index()) % kWarp) keys[index] = 0;  // cleared by the lane that reads it
  return index;
}

// Scratch memory of a warp.
struct SelectionScratch {
  uint32_t* keys;    // [E]
  uint32_t* groups;  // [num_groups]
};

// values[i] = row[first + i * kWarp], or `fill` from `end` on. All loads are in flight together.
template <int kCount>
__device__ __forceinline__ void load_strided(const void* row, int32_t dtype, int64_t begin, int first, int end,
                                             float fill, float (&values)[kCount]) {
  with_float_type(dtype, [&]<class T>(T) {
    const T* const from = static_cast<const T*>(row) + begin;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = first + i * kWarp < end ? to_float(from[first + i * kWarp]) : fill;
    }
  });
}

// keys[e] = the ordering key of expert e of token t, from its score or its logit; 0 if its group is not selected.
// groups: 0 for selected groups; nullptr: all groups are selected.
static __device__ __noinline__ void order_experts(const RouterForward& op, const RowSoftmax& softmax, int64_t t,
                                                  bool by_score, const uint32_t* groups, uint32_t* keys) {
  const int E = static_cast<int>(op.E);
  const int group_size = groups == nullptr ? E : E / op.num_groups;
  constexpr int kAtOnce = 4;  // per lane
#pragma unroll 1
  for (int first = lane_index(); first < E; first += kAtOnce * kWarp) {
    float z[kAtOnce];
    float bias[kAtOnce] = {};
    load_strided(op.logits, op.logits_dtype, t * E, first, E, -INFINITY, z);
    if (by_score && op.bias != nullptr) load_strided(op.bias, op.bias_dtype, 0, first, E, 0.0f, bias);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int e = first + i * kWarp;
      if (e >= E) break;
      const bool selectable = groups == nullptr || groups[e / group_size] == 0;
      keys[e] = selectable ? ordered_bits(by_score ? biased_score(op, softmax, z[i], bias[i]) : z[i]) : 0u;
    }
  }
  __syncwarp();
}

// experts[k] = the index of the k-th largest key, the first of equal ones, for k < count; -1 if no key above 0 is left.
// Extracted keys become 0. Each lane caches the largest of its own keys, so only the lane that loses it searches again.
// This is faster for short rows; in long rows it is faster if all lanes search.
static __device__ __noinline__ void extract_in_order(uint32_t* keys, int size, int count, int32_t* experts) {
  uint32_t best;
  unsigned at;
  const auto search = [&] {
    best = 0;
    at = kAllLanes;
#pragma unroll 4
    for (int i = lane_index(); i < size; i += kWarp) {
      const uint32_t key = keys[i];
      if (key > best) {
        best = key;
        at = static_cast<unsigned>(i);
      }
    }
  };
  search();
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    const uint32_t value = __reduce_max_sync(kAllLanes, best);
    const unsigned index = __reduce_min_sync(kAllLanes, value != 0 && best == value ? at : kAllLanes);
    if (lane_index() == 0) experts[k] = static_cast<int32_t>(index);
    if (value != 0 && at == index) {
      keys[index] = 0;
      search();
    }
    __syncwarp();
  }
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
        extract_largest(scratch.keys, group * group_size, (group + 1) * group_size, &value);
        sum += from_ordered_bits(value);
      }
      if (lane_index() == 0) scratch.groups[group] = ordered_bits(sum);
    }
    __syncwarp();
    // Extract the selected groups: their keys become 0.
#pragma unroll 1
    for (int n = 0; n < op.group_topk; ++n) extract_largest(scratch.groups, 0, op.num_groups, &value);
    __syncwarp();
  }
  order_experts(op, softmax, t, selection.by_score, op.num_groups > 0 ? scratch.groups : nullptr, scratch.keys);
  constexpr int kShortRow = 1024;
  if (E <= kShortRow) {
    extract_in_order(scratch.keys, E, selection.ranks, experts);
    return;
  }
#pragma unroll 1
  for (int k = 0; k < selection.ranks; ++k) {
    const int expert = extract_largest(scratch.keys, 0, E, &value);
    if (lane_index() == 0) experts[k] = expert;
  }
  __syncwarp();
}

}  // namespace anabranch::cuda
