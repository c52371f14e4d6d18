// Reading and writing rows of logits, and the router's mathematics of one token on kLanes lanes.
#pragma once

#include <cstdint>

#include "core/cuda/warp.cuh"
#include "core/dtype.h"
#include "core/math.h"
#include "router/score.h"

namespace anabranch::cuda {

__device__ __forceinline__ float load_float(const void* values, int32_t dtype, int64_t i) {
  return with_float_type(dtype, [&]<class T>(T) { return to_float(static_cast<const T*>(values)[i]); });
}

__device__ __forceinline__ void store_float(void* values, int32_t dtype, int64_t i, float value) {
  with_float_type(dtype, [&]<class T>(T) { static_cast<T*>(values)[i] = from_float<T>(value); });
}

// 4 bytes of a row as float32: one or two elements.
template <class T>
__device__ __forceinline__ void unpack(uint32_t word, float* to) {
  if constexpr (sizeof(T) == 4) {
    to[0] = __uint_as_float(word);
  } else {
    to[0] = to_float(T{static_cast<uint16_t>(word & 0xffffu)});
    to[1] = to_float(T{static_cast<uint16_t>(word >> 16)});
  }
}

// items[i] = element first + i of a row of `count`, `fill` past its end. vectors: all rows start at 16 bytes, and are
// made of whole ones.
template <int kItems>
__device__ __forceinline__ void load_items(const void* row, int32_t dtype, bool vectors, int first, int count,
                                           float fill, float (&items)[kItems]) {
  with_float_type(dtype, [&]<class T>(T) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(T));
    const T* from = static_cast<const T*>(row) + first;
    if (vectors && kItems % kVector == 0) {
#pragma unroll
      for (int i = 0; i < kItems; i += kVector) {
        if (first + i < count) {
          // By value: through a reference the compiler would load the elements one by one.
          const uint4 bytes = __ldg(reinterpret_cast<const uint4*>(from + i));
          constexpr int kWord = 4 / static_cast<int>(sizeof(T));
          unpack<T>(bytes.x, items + i);
          unpack<T>(bytes.y, items + i + kWord);
          unpack<T>(bytes.z, items + i + 2 * kWord);
          unpack<T>(bytes.w, items + i + 3 * kWord);
        } else {
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            if (i + j < kItems) items[i + j] = fill;
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) items[i] = first + i < count ? to_float(from[i]) : fill;
    }
  });
}

inline bool rows_are_vectors(const void* data, int64_t columns, int64_t element_size) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && columns * element_size % 16 == 0;
}

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

// Turns value[s] from z of a slot into its weight before scaling, 0 where its expert is -1; a token's slots are in
// kLanes lanes. poison: NaN if a softmax row was broken, else 0. Returns the factor that normalises.
template <int kScore, int kLanes, int kSlots>
__device__ __forceinline__ float weigh_slots(int32_t score_function, bool normalize, const RowSoftmax& softmax,
                                             float poison, const int32_t (&expert)[kSlots], float (&value)[kSlots]) {
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
  const float inverse = reciprocal(sum_lanes<kLanes>(sum) + (kScore == AB_SOFTMAX ? poison : kSumEpsilon));
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    if (expert[s] >= 0) value[s] *= inverse;
  }
  return inverse;
}

// The slots of a token, in shared memory: its K experts (-1: none) and a float for each. Lane `lane` of the token's
// kLanes keeps slots lane, lane + kLanes, ... to itself, so passes over them need no barrier.
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

// Turns values from z of each slot into its weight before scaling. Returns what the weights were divided by; `poison`
// is NaN if a softmax row was broken, else 0.
template <int kLanes>
__device__ __forceinline__ float score_slots(int32_t score_function, bool normalize, const RowSoftmax& softmax,
                                             float poison, const Slots& slots, int lane) {
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
  sum = sum_lanes<kLanes>(sum) + (score_function == AB_SOFTMAX ? poison : kSumEpsilon);
  for_own_slots<kLanes>(slots, lane, [&](int k, int) { slots.values[k] /= sum; });
  return sum;
}

}  // namespace anabranch::cuda
