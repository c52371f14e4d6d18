// What becomes of an element of the up product, for kernels that write single ones.
#pragma once

#include "experts/activation.h"
#include "experts/cuda/ops/up.h"

namespace anabranch::cuda {

// sum, and gated, that of `up`: x W_in[expert] at `column` of F. slot -1: of padding.
__device__ __forceinline__ void write_up(const Up& up, int32_t expert, int64_t row, int64_t column, int32_t slot,
                                         float sum, float sum_up) {
  const FfnSizes& s = up.s;
  const auto add_bias = [&](float h, int64_t part) {
    if (slot < 0) return 0.0f;
    return up.b_in.data == nullptr ? h : h + up.b_in[expert * s.P * s.F + s.hidden_column(part, column)];
  };
  const float gate = add_bias(sum, 0);
  const float other = s.P == 2 ? add_bias(sum_up, 1) : 1.0f;
  float a = 0.0f;
  if (slot >= 0) {
    with_formula(up.activation,
                 [&]<Formula kFormula>() { a = up.weights[slot] * activate<kFormula>(up.activation, gate, other); });
  }
  up.a.set(row * s.F + column, a);
  if (up.h.data == nullptr) return;
  up.h.set(row * s.P * s.F + s.hidden_column(0, column), gate);
  if (s.P == 2) up.h.set(row * s.P * s.F + s.hidden_column(1, column), other);
}

}  // namespace anabranch::cuda
