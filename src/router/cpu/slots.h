// The selected experts of kLanes tokens: arrays [K][kLanes], one token per lane. Forward and backward share the
// functions that gather the selected logits and convert them to scores. Internal linkage: *.isa.cc files include this
// header.
#pragma once

#include <cstdint>

#include "router/cpu/row.h"
#include "router/cpu/topk.h"
#include "router/score.h"

namespace anabranch {
namespace {

// The softmax over all E of each lane: s = exp(z - shift) * factor. `nan_or_zero` is NaN if the row contains NaN or
// +inf, else 0.
struct LaneSoftmax {
  float shift[kLanes] = {};
  float sum[kLanes] = {};  // sum of exp(z - shift)
  float factor[kLanes] = {};
  float nan_or_zero[kLanes] = {};
};

// sum over k of term(k), with four partial sums.
template <class Term>
[[gnu::always_inline]] inline LaneFloats sum_slots(int64_t K, const Term& term) {
  LaneFloats partial[4] = {};
  int64_t k = 0;
  for (; k + 4 <= K; k += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) partial[i] += term(k + i);
  }
  for (; k < K; ++k) partial[0] += term(k);
  return (partial[0] + partial[1]) + (partial[2] + partial[3]);
}

// z[k][lane] = logits[first + lane][experts[k][lane]], or -inf if the expert is -1.
inline void gather_logits(const void* logits, int32_t dtype, int64_t E, int64_t K, int64_t first,
                          const int32_t* experts, float* z) {
  with_float_type(dtype, [&]<class T>(T) {
    const T* rows = static_cast<const T*>(logits) + first * E;
    for (int64_t k = 0; k < K; ++k) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int32_t e = experts[k * kLanes + lane];
        z[k * kLanes + lane] = e < 0 ? -__builtin_inff() : to_float(rows[lane * E + e]);
      }
    }
  });
}

// Converts the selected logits in place to weights before scaling: s_k, or s_k / S if normalised. For normalised
// softmax that is the softmax over the selected logits. If `total` is not null it receives S (for softmax: 1).
inline void score_slots(int32_t score_function, bool normalize, int64_t K, const LaneSoftmax& softmax, float* z,
                        float* total) {
  const int64_t count = K * kLanes;
  if (score_function == AB_SOFTMAX && !normalize) {
    for (int64_t k = 0; k < K; ++k) {
      store_lanes(z + k * kLanes, load_lanes(z + k * kLanes) - load_lanes(softmax.shift));
    }
    for (int64_t i = 0; i < count; ++i) z[i] = exp_flushed_f32(z[i]);
    for (int64_t k = 0; k < K; ++k) {
      store_lanes(z + k * kLanes, load_lanes(z + k * kLanes) * load_lanes(softmax.factor));
    }
    return;
  }
  if (score_function == AB_SOFTMAX) {
    LaneFloats top = load_lanes(z);
    for (int64_t k = 1; k < K; ++k) {
      const LaneFloats v = load_lanes(z + k * kLanes);
      top = v > top ? v : top;
    }
    for (int64_t k = 0; k < K; ++k) store_lanes(z + k * kLanes, load_lanes(z + k * kLanes) - top);
    for (int64_t i = 0; i < count; ++i) z[i] = exp_flushed_f32(z[i]);
  } else {
    score_row(score_function, z, count, z);
  }
  if (!normalize) return;
  const LaneFloats start = score_function == AB_SOFTMAX ? load_lanes(softmax.nan_or_zero) : LaneFloats{} + kSumEpsilon;
  const LaneFloats sum = sum_slots(K, [z](int64_t k) { return load_lanes(z + k * kLanes); }) + start;
  for (int64_t k = 0; k < K; ++k) store_lanes(z + k * kLanes, load_lanes(z + k * kLanes) / sum);
  if (total != nullptr) store_lanes(total, sum);
}

}  // namespace
}  // namespace anabranch
