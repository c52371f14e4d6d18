// The up GEMM as a small-M GEMM: its units and its epilogue.
#pragma once

#include "experts/activation.h"
#include "experts/few_rows/product.cuh"
#include "experts/few_rows/products.h"

namespace anabranch::cuda::few_rows {

// Stores an element of `a` and of h. sum: x W_in[expert] at `column` of F; sum_up: the up part if gated. slot -1: the
// row is padding.
struct WriteUp {
  Up up;
  __device__ __forceinline__ void operator()(int32_t expert, int64_t row, int64_t column, int32_t slot, float sum,
                                             float sum_up) const {
    const FfnSizes& s = up.s;
    const auto add_bias = [&](float h, int64_t part) {
      if (slot < 0) return 0.0f;
      return up.b_in.data == nullptr ? h : h + up.b_in[expert * s.P * s.F + s.intermediate_column(part, column)];
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
    up.h.set(row * s.P * s.F + s.intermediate_column(0, column), gate);
    if (s.P == 2) up.h.set(row * s.P * s.F + s.intermediate_column(1, column), other);
  }
};

inline Product product_of(const Up& up) {
  const FfnSizes& s = up.s;
  Product product;
  product.main = {.x = up.x.data,
                  .gathers = up.map.by_slot,
                  .w = up.w_in.data,
                  .matrix = s.D * s.P * s.F,
                  .k = static_cast<int32_t>(s.D)};
  product.low_rank = operands_of(up.low_rank, s.P * s.F);
  product.map = up.map;
  product.groups = groups_of(up.group_sizes, s.E, s.R, up.range);
  product.columns = {static_cast<int32_t>(s.F), s.P == 2, s.P == 2 && s.layout.interleaved, static_cast<int32_t>(s.F)};
  product.skips_rest = up.skips_rest;
  return product;
}

}  // namespace anabranch::cuda::few_rows
