// Formulas of the router for one token on kLanes lanes: scores, and the weights of its slots.
#pragma once

#include <cstdint>

#include "core/cuda/warp.cuh"
#include "core/math.h"
#include "router/cuda/instructions.cuh"
#include "router/score.h"

namespace anabranch::cuda {

// softmax(z)_e = 2^(z_e log2(e) - shift) * factor
struct RowSoftmax {
  float shift;
  float factor;

  __device__ __forceinline__ float power(float z) const { return exp2_flushed_f32(fmaf(z, kLog2E, -shift)); }
};

// s of the elementwise score functions.
__device__ __forceinline__ float elementwise_score(int32_t score_function, float z) {
  return score_function == AB_SIGMOID ? sigmoid(z) : sqrtsoftplus(z);
}
__device__ __forceinline__ float elementwise_slope(int32_t score_function, float z) {
  return score_function == AB_SIGMOID ? sigmoid_gradient(z) : sqrtsoftplus_gradient(z);
}

// Converts value[s] from the logit of a slot to its weight before scaling; 0 if its expert is -1. A token's slots are
// distributed over kLanes lanes. nan_or_zero: NaN if a softmax row contains NaN or infinity, else 0. Returns the
// normalising factor.
template <int kScore, int kLanes, int kSlots>
__device__ __forceinline__ float weigh_slots(int32_t score_function, bool normalize, const RowSoftmax& softmax,
                                             float nan_or_zero, const int32_t (&expert)[kSlots],
                                             float (&value)[kSlots]) {
  RowSoftmax own = softmax;
  if (kScore == AB_SOFTMAX && normalize) {
    float top = value[0];
#pragma unroll
    for (int s = 1; s < kSlots; ++s) top = fmaxf(top, value[s]);
    own = {max_lanes<kLanes>(top) * kLog2E, 1.0f};
  }
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const float z = value[s];
    value[s] = kScore == AB_SOFTMAX ? own.power(z) * own.factor : elementwise_score(score_function, z);
    if (expert[s] < 0) value[s] = 0.0f;
    sum += value[s];
  }
  if (!normalize) return 1.0f;
  const float inverse = reciprocal(sum_lanes<kLanes>(sum) + (kScore == AB_SOFTMAX ? nan_or_zero : kSumEpsilon));
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    if (expert[s] >= 0) value[s] *= inverse;
  }
  return inverse;
}

// The slots of a token in shared memory: its K experts (-1: none) and one float per slot. Lane `lane` of the token's
// kLanes lanes owns slots lane, lane + kLanes, ..., so passes over them need no barrier.
struct Slots {
  int32_t* experts;
  float* values;
  int K;
};

template <int kLanes, class F>
__device__ __forceinline__ void for_own_slots(const Slots& slots, int lane, const F& f) {
  for (int k = lane; k < slots.K; k += kLanes) {
    if (slots.experts[k] >= 0) f(k, slots.experts[k]);
  }
}

// Like weigh_slots, for any number of slots in memory. Returns the divisor of the weights.
template <int kLanes>
__device__ __forceinline__ float score_slots(int32_t score_function, bool normalize, const RowSoftmax& softmax,
                                             float nan_or_zero, const Slots& slots, int lane) {
  float sum = 0.0f;
  if (score_function == AB_SOFTMAX && normalize) {
    float top = -INFINITY;
    for_own_slots<kLanes>(slots, lane, [&](int k, int) { top = fmaxf(top, slots.values[k]); });
    const float shift = max_lanes<kLanes>(top) * kLog2E;
    for_own_slots<kLanes>(slots, lane, [&](int k, int) {
      const float power = exp2_flushed_f32(fmaf(slots.values[k], kLog2E, -shift));
      slots.values[k] = power;
      sum += power;
    });
  } else {
    for_own_slots<kLanes>(slots, lane, [&](int k, int) {
      const float z = slots.values[k];
      const float s =
          score_function == AB_SOFTMAX ? softmax.power(z) * softmax.factor : elementwise_score(score_function, z);
      slots.values[k] = s;
      sum += s;
    });
  }
  if (!normalize) return 1.0f;
  sum = sum_lanes<kLanes>(sum) + (score_function == AB_SOFTMAX ? nan_or_zero : kSumEpsilon);
  for_own_slots<kLanes>(slots, lane, [&](int k, int) { slots.values[k] /= sum; });
  return sum;
}

}  // namespace anabranch::cuda
