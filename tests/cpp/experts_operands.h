// Operands for the tests of the experts' operations.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "anabranch/experts.h"
#include "core/dtype.h"
#include "support.h"

namespace anabranch::testing {

using Floats = Tensor<float>;
using Ints = Tensor<int32_t>;

// Deterministic values in [-1, 1).
inline std::vector<float> noise(int64_t size, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(size));
  uint32_t state = seed * 2654435761u + 12345u;
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
  return values;
}

inline Floats random(const std::vector<int64_t>& shape, uint32_t seed) {
  return {shape, noise(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()), seed)};
}

inline Tensor<uint16_t> random_bf16(const std::vector<int64_t>& shape, uint32_t seed) {
  const Floats values = random(shape, seed);
  std::vector<uint16_t> rounded;
  for (const float value : values.values()) rounded.push_back(from_float<BFloat16>(value).bits);
  return {shape, rounded};
}

// Checks that sum = before + gradient, and that sum has the bits of before where the gradient is zero (experts without
// rows).
inline void expect_accumulated(const Floats& sum, const Floats& before, const Floats& gradient) {
  for (int64_t i = 0; i < sum.size(); ++i) {
    if (gradient[i] == 0.0f) {
      ASSERT_EQ(sum[i], before[i]) << i;
    } else {
      ASSERT_NEAR(sum[i], before[i] + gradient[i], 1e-6f * (64 + std::abs(gradient[i]))) << i;
    }
  }
}

// Expert e has rows [offsets[e], offsets[e + 1]). Sizes are clipped as experts.h describes.
inline std::vector<int64_t> offsets_of(const std::vector<int32_t>& sizes, int64_t R) {
  std::vector<int64_t> offsets{0};
  for (const int32_t size : sizes) offsets.push_back(offsets.back() + std::clamp<int64_t>(size, 0, R - offsets.back()));
  return offsets;
}

// Bounds the error of a tensor relative to its norm. Zeros must be exact.
template <class Values>
void expect_near(const Values& got, const std::vector<double>& want, double bound, const std::string& name) {
  ASSERT_EQ(static_cast<int64_t>(want.size()), static_cast<int64_t>(got.size())) << name;
  double error = 0;
  double norm = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
    const double expected = want[static_cast<size_t>(i)];
    error += (got[i] - expected) * (got[i] - expected);
    norm += expected * expected;
    ASSERT_TRUE(expected != 0 || got[i] == 0) << name << " " << i << ": " << got[i] << " where zero is expected";
  }
  EXPECT_LE(std::sqrt(error), bound * std::sqrt(norm)) << name;
}

// An expert MLP with all its operands and results, for T tokens with K experts each. T_ is the element type.
template <class T_>
struct Network {
  int64_t T, K, R, E, D, P, F;
  Tensor<T_> x, w_in, b_in, w_out, b_out, d_out;
  Floats weights;
  Ints slot_of_row, group_sizes;
  // Results.
  Tensor<T_> y, h, dh, dx_rows, d_w_in, d_b_in, d_w_out, d_b_out;
  Floats d_weights;
  int32_t activation = AB_SILU;
  float alpha = 0.0f;
  float limit = 0.0f;
  int32_t early = 0;
  int32_t precision = AB_PRECISION_HIGHEST;

  static Tensor<T_> values(const std::vector<int64_t>& shape, uint32_t seed) {
    if constexpr (sizeof(T_) == 4) {
      return random(shape, seed);
    } else {
      return random_bf16(shape, seed);
    }
  }

  Network(int64_t tokens, int64_t topk, int64_t width, int64_t parts, int64_t intermediate,
          const std::vector<int32_t>& sizes, const std::vector<int32_t>& slots)
      : T(tokens),
        K(topk),
        R(static_cast<int64_t>(slots.size())),
        E(static_cast<int64_t>(sizes.size())),
        D(width),
        P(parts),
        F(intermediate),
        x(values({T, D}, 1)),
        w_in(values({E, D, P, F}, 2)),
        b_in(values({E, P, F}, 3)),
        w_out(values({E, F, D}, 4)),
        b_out(values({E, D}, 5)),
        d_out(values({T, D}, 6)),
        weights(random({T, K}, 7)),
        slot_of_row({R}, slots),
        group_sizes({E}, sizes),
        y({R, D}),
        h({R, P, F}),
        dh({R, P, F}),
        dx_rows({R, D}),
        d_w_in({E, D, P, F}),
        d_b_in({E, P, F}),
        d_w_out({E, F, D}),
        d_b_out({E, D}),
        d_weights({T, K}) {}

  ab_expert_ffn_forward_args forward_args() const {
    ab_expert_ffn_forward_args args{};
    args.size = sizeof(args);
    args.activation = activation;
    args.weight_early = early;
    args.topk = static_cast<int32_t>(K);
    args.x = x.view();
    args.slot_of_row = slot_of_row.view();
    args.group_sizes = group_sizes.view();
    args.w_in = w_in.view();
    args.b_in = b_in.view();
    args.w_out = w_out.view();
    args.b_out = b_out.view();
    args.weights = weights.view();
    args.y = y.view();
    args.h = h.view();
    args.activation_alpha = alpha;
    args.activation_limit = limit;
    args.precision = precision;
    return args;
  }
  ab_expert_ffn_backward_args backward_args() const {
    ab_expert_ffn_backward_args args{};
    args.size = sizeof(args);
    args.activation = activation;
    args.topk = static_cast<int32_t>(K);
    args.x = x.view();
    args.slot_of_row = slot_of_row.view();
    args.group_sizes = group_sizes.view();
    args.w_in = w_in.view();
    args.w_out = w_out.view();
    args.b_out = b_out.view();
    args.weights = weights.view();
    args.h = h.view();
    args.d_out = d_out.view();
    args.dh = dh.view();
    args.dx_rows = dx_rows.view();
    args.d_w_in = d_w_in.view();
    args.d_b_in = d_b_in.view();
    args.d_w_out = d_w_out.view();
    args.d_b_out = d_b_out.view();
    args.d_weights = d_weights.view();
    args.activation_alpha = alpha;
    args.activation_limit = limit;
    args.precision = precision;
    return args;
  }
  ab_status forward(int threads = 0) const {
    return call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward_args(), threads);
  }
  ab_status backward(int threads = 0) const {
    return call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, backward_args(), threads);
  }
};

// Slots in reverse order. Every fifth row is padding, and so are rows for which no slot is left. Rows past the groups
// get slots too.
inline std::vector<int32_t> mixed_slots(int64_t R, int64_t slots) {
  const int32_t none[] = {-1, INT32_MIN, INT32_MAX, static_cast<int32_t>(slots)};
  std::vector<int32_t> result(static_cast<size_t>(R));
  int64_t next = slots - 1;
  for (int64_t r = 0; r < R; ++r) {
    result[static_cast<size_t>(r)] = r % 5 == 3 || next < 0 ? none[r % 4] : static_cast<int32_t>(next--);
  }
  return result;
}

// row_of_slot [T, K] for slot_of_row; -1 for a slot without a row.
inline Ints invert(const Ints& slot_of_row, int64_t T, int64_t K) {
  std::vector<int32_t> rows(static_cast<size_t>(T * K), -1);
  for (int64_t r = 0; r < slot_of_row.size(); ++r) {
    const int32_t slot = slot_of_row[r];
    if (slot >= 0 && slot < T * K) rows[static_cast<size_t>(slot)] = static_cast<int32_t>(r);
  }
  return {{T, K}, rows};
}

// The slots 0 to count - 1 in order.
inline std::vector<int32_t> slots_in_order(int64_t count) {
  std::vector<int32_t> slots(static_cast<size_t>(count));
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

}  // namespace anabranch::testing
