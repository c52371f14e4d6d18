// An expert MLP with adapters of both projections, and its float64 reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>

#include "lora_reference.h"
#include "two_calls.h"

namespace anabranch::testing {

struct LoraCase {
  int64_t T = 12, K = 2, R = 28, D = 7, P = 2, F = 6;
  int64_t rank_in = 2, rank_out = 3;
  std::vector<int32_t> sizes = {9, 0, 1, 12};
  int32_t dtype = AB_FLOAT32;
  int32_t factor_dtype = AB_FLOAT32;
  Order w_in, w_out, intermediate;  // memory order of W_in, W_out, and of h and b_in
  Order a, b_in, b_out;             // memory order of the factors
  bool shares_a = false, shares_b = false;
  bool by_slot = true;  // false: x and d_out have one row per row of the experts
  int32_t early = 0;
  int32_t precision = AB_PRECISION_HIGHEST;
  bool has_zero_weights = false;  // W_in and W_out are zero
};

inline void remove_in(ab_expert_ffn_forward_args* args) {
  args->lora_scale_in = 0.0f;
  args->lora_a_in = args->lora_b_in = args->lora_u = nullptr;
}
inline void remove_out(ab_expert_ffn_forward_args* args) {
  args->lora_scale_out = 0.0f;
  args->lora_a_out = args->lora_b_out = args->lora_z = nullptr;
}
inline void remove_in(ab_expert_ffn_backward_args* args) {
  args->lora_scale_in = 0.0f;
  args->lora_a_in = args->lora_b_in = args->lora_u = nullptr;
  args->lora_v_in = args->d_lora_a_in = args->d_lora_b_in = nullptr;
}
inline void remove_out(ab_expert_ffn_backward_args* args) {
  args->lora_scale_out = 0.0f;
  args->lora_a_out = args->lora_b_out = args->lora_v_out = args->d_lora_a_out = args->d_lora_b_out = nullptr;
}

struct LoraNetwork {
  static constexpr float kScaleIn = 0.75f;
  static constexpr float kScaleOut = -1.5f;

  LoraCase c;
  int64_t E, tokens;
  Ints slot_of_row, group_sizes;
  std::map<std::string, OrderedTensor> tensors;  // by argument name
  std::set<std::string> inputs;

  explicit LoraNetwork(const LoraCase& given)
      : c(given),
        E(static_cast<int64_t>(c.sizes.size())),
        tokens(c.by_slot ? c.T : c.R),
        slot_of_row({c.R}, mixed_slots(c.R, c.T * c.K)),
        group_sizes({E}, c.sizes) {
    const int64_t experts_a = c.shares_a ? 1 : E;
    const int64_t experts_b = c.shares_b ? 1 : E;
    input("x", {tokens, c.D}, c.dtype, {}, true);
    input("d_out", {tokens, c.D}, c.dtype, {}, true);
    input("weights", slots(), AB_FLOAT32);
    input("b_in", {E, c.P, c.F}, c.dtype, c.intermediate);
    input("b_out", {E, c.D}, c.dtype);
    input("w_in", {E, c.D, c.P, c.F}, c.dtype, c.w_in, true, c.has_zero_weights ? 0 : 1);
    input("w_out", {E, c.F, c.D}, c.dtype, c.w_out, true, c.has_zero_weights ? 0 : 1);
    input("lora_a_in", {experts_a, c.D, c.rank_in}, c.factor_dtype, c.a);
    input("lora_b_in", {experts_b, c.rank_in, c.P, c.F}, c.factor_dtype, c.b_in);
    input("lora_a_out", {experts_a, c.F, c.rank_out}, c.factor_dtype, c.a);
    input("lora_b_out", {experts_b, c.rank_out, c.D}, c.factor_dtype, c.b_out);
    output("y", {c.R, c.D}, c.dtype);
    output("a", {c.R, c.F}, c.dtype);
    output("h", {c.R, c.P, c.F}, c.dtype, c.intermediate);
    output("lora_u", {c.R, c.rank_in}, c.dtype);
    output("lora_z", {c.R, c.rank_out}, c.dtype);
    output("dh", {c.R, c.P, c.F}, c.dtype, c.intermediate);
    output("weighted_a", {c.R, c.F}, c.dtype);
    output("lora_v_in", {c.R, c.rank_in}, c.dtype);
    output("lora_v_out", {c.R, c.rank_out}, c.dtype);
    output("dx_rows", {c.R, c.D}, c.dtype);
    output("d_weights", slots(), AB_FLOAT32);
    output("d_w_in", {E, c.D, c.P, c.F}, AB_FLOAT32, c.w_in);
    output("d_b_in", {E, c.P, c.F}, c.dtype, c.intermediate);
    output("d_w_out", {E, c.F, c.D}, AB_FLOAT32, c.w_out);
    output("d_b_out", {E, c.D}, c.dtype);
    output("d_lora_a_in", {experts_a, c.D, c.rank_in}, c.factor_dtype);
    output("d_lora_b_in", {experts_b, c.rank_in, c.P, c.F}, c.factor_dtype);
    output("d_lora_a_out", {experts_a, c.F, c.rank_out}, c.factor_dtype);
    output("d_lora_b_out", {experts_b, c.rank_out, c.D}, c.factor_dtype);
  }

  std::vector<int64_t> slots() const { return c.by_slot ? std::vector<int64_t>{c.T, c.K} : std::vector<int64_t>{c.R}; }
  void output(const std::string& name, const std::vector<int64_t>& shape, int32_t dtype, const Order& order = {}) {
    tensors.try_emplace(name, shape, dtype, order);
  }
  // Whole multiples of 1/8 up to 15/8 are values that every float dtype represents, and blocks of float8_e4m3 whose
  // scales are powers of two as well.
  void input(const std::string& name, const std::vector<int64_t>& shape, int32_t dtype, const Order& order = {},
             bool in_eighths = false, double scale = 1) {
    output(name, shape, dtype, order);
    inputs.insert(name);
    OrderedTensor& tensor = (*this)[name];
    const std::vector<float> values = noise(tensor.size(), static_cast<uint32_t>(inputs.size()));
    for (int64_t i = 0; i < tensor.size(); ++i) {
      const double value = values[static_cast<size_t>(i)];
      tensor.set(i, scale * (in_eighths ? std::round(15 * value) / 8 : value));
    }
  }
  OrderedTensor& operator[](const std::string& name) { return tensors.at(name); }
  const ab_tensor* view(const std::string& name) const { return tensors.at(name).view(); }

  // Sets the fields that the forward and the backward pass share.
  template <class Args>
  Args common_args() const {
    Args args{};
    args.size = sizeof(args);
    args.topk = c.by_slot ? static_cast<int32_t>(c.K) : 0;
    args.precision = c.precision;
    args.fp8_scales = c.precision == AB_PRECISION_FP8 ? AB_FP8_SCALES_POWER_OF_TWO : 0;
    args.slot_of_row = c.by_slot ? slot_of_row.view() : nullptr;
    args.group_sizes = group_sizes.view();
    args.lora_scale_in = kScaleIn;
    args.lora_scale_out = kScaleOut;
#define ANABRANCH_SET(field) args.field = view(#field)
    ANABRANCH_SET(x);
    ANABRANCH_SET(w_in);
    ANABRANCH_SET(w_out);
    ANABRANCH_SET(b_out);
    ANABRANCH_SET(weights);
    ANABRANCH_SET(h);
    ANABRANCH_SET(lora_a_in);
    ANABRANCH_SET(lora_b_in);
    ANABRANCH_SET(lora_a_out);
    ANABRANCH_SET(lora_b_out);
    ANABRANCH_SET(lora_u);
    return args;
  }
  ab_expert_ffn_forward_args forward_args() const {
    auto args = common_args<ab_expert_ffn_forward_args>();
    args.weight_early = c.early;
    ANABRANCH_SET(b_in);
    ANABRANCH_SET(y);
    ANABRANCH_SET(a);
    ANABRANCH_SET(lora_z);
    return args;
  }
  ab_expert_ffn_backward_args backward_args() const {
    auto args = common_args<ab_expert_ffn_backward_args>();
    ANABRANCH_SET(d_out);
    ANABRANCH_SET(dh);
    ANABRANCH_SET(weighted_a);
    ANABRANCH_SET(lora_v_in);
    ANABRANCH_SET(lora_v_out);
    ANABRANCH_SET(dx_rows);
    ANABRANCH_SET(d_weights);
    ANABRANCH_SET(d_w_in);
    ANABRANCH_SET(d_b_in);
    ANABRANCH_SET(d_w_out);
    ANABRANCH_SET(d_b_out);
    ANABRANCH_SET(d_lora_a_in);
    ANABRANCH_SET(d_lora_b_in);
    ANABRANCH_SET(d_lora_a_out);
    ANABRANCH_SET(d_lora_b_out);
    return args;
  }
#undef ANABRANCH_SET

  static ab_status run(const ab_expert_ffn_forward_args& args, int threads = 0) {
    return call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, args, threads);
  }
  static ab_status run(const ab_expert_ffn_backward_args& args, int threads = 0) {
    return call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args, threads);
  }
  void compute(int threads = 0) const {
    EXPECT_OK(run(forward_args(), threads));
    EXPECT_OK(run(backward_args(), threads));
  }

  // Rows of expert e that have a slot.
  std::vector<int64_t> rows_of(int64_t e) const {
    const std::vector<int64_t> offsets = offsets_of(c.sizes, c.R);
    std::vector<int64_t> rows;
    for (int64_t r = offsets[static_cast<size_t>(e)]; r < offsets[static_cast<size_t>(e) + 1]; ++r) {
      if (!c.by_slot || (slot_of_row[r] >= 0 && slot_of_row[r] < c.T * c.K)) rows.push_back(r);
    }
    return rows;
  }

  std::map<std::string, Doubles> reference() const;
};

inline std::map<std::string, Doubles> LoraNetwork::reference() const {
  std::map<std::string, Doubles> want;
  for (const auto& [name, tensor] : tensors) want[name].resize(static_cast<size_t>(tensor.size()));
  const auto input = [&](const char* name) -> const OrderedTensor& { return tensors.at(name); };
  LoraReference in(input("w_in"), input("lora_a_in"), input("lora_b_in"), kScaleIn);
  LoraReference out(input("w_out"), input("lora_a_out"), input("lora_b_out"), kScaleOut);
  const int64_t D = c.D, F = c.F, PF = c.P * c.F;
  for (int64_t e = 0; e < E; ++e) {
    const std::vector<int64_t> rows = rows_of(e);
    const auto m = static_cast<int64_t>(rows.size());
    const auto slot = [&](int64_t i) {
      const int64_t r = rows[static_cast<size_t>(i)];
      return c.by_slot ? int64_t{slot_of_row[r]} : r;
    };
    const auto gather = [&](const char* name) {
      Doubles values;
      for (int64_t i = 0; i < m; ++i) {
        const int64_t row = c.by_slot ? slot(i) / c.K : slot(i);
        for (int64_t d = 0; d < D; ++d) values.push_back(input(name)[row * D + d]);
      }
      return values;
    };
    const auto scatter = [&](const char* name, const Doubles& values, int64_t columns) {
      for (int64_t i = 0; i < m; ++i) {
        std::copy_n(values.data() + i * columns, columns, want[name].data() + rows[static_cast<size_t>(i)] * columns);
      }
    };
    const Doubles x = gather("x");
    const Doubles d_y = gather("d_out");
    Doubles h = in.y(e, x, m);
    Doubles a(static_cast<size_t>(m * F)), weighted_a = a, slopes(h.size());
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < PF; ++j) h[static_cast<size_t>(i * PF + j)] += input("b_in")[e * PF + j];
      for (int64_t f = 0; f < F; ++f) {
        const auto gate = static_cast<size_t>(i * PF + f);
        const auto up = static_cast<size_t>(i * PF + PF - F + f);
        const double sigmoid = 1 / (1 + std::exp(-h[gate]));
        const double factor = c.P == 2 ? h[up] : 1;
        if (c.P == 2) slopes[up] = h[gate] * sigmoid;
        slopes[gate] = sigmoid * (1 + h[gate] * (1 - sigmoid)) * factor;
        a[static_cast<size_t>(i * F + f)] = h[gate] * sigmoid * factor;
        weighted_a[static_cast<size_t>(i * F + f)] = h[gate] * sigmoid * factor * input("weights")[slot(i)];
      }
    }
    const Doubles& down = c.early != 0 ? weighted_a : a;
    Doubles y = out.y(e, down, m);
    const Doubles d_a = out.d_x(e, d_y, m);
    Doubles dh = slopes;
    for (int64_t i = 0; i < m; ++i) {
      const double weight = input("weights")[slot(i)];
      double& d_weight = want["d_weights"][static_cast<size_t>(slot(i))];
      for (int64_t d = 0; d < D; ++d) {
        const auto at = static_cast<size_t>(i * D + d);
        const double bias = input("b_out")[e * D + d];
        y[at] = (c.early != 0 ? y[at] : weight * y[at]) + weight * bias;
        d_weight += d_y[at] * bias;
        want["d_b_out"][static_cast<size_t>(e * D + d)] += weight * d_y[at];
      }
      for (int64_t f = 0; f < F; ++f) {
        const auto at = static_cast<size_t>(i * F + f);
        d_weight += d_a[at] * a[at];
        for (int64_t p = 0; p < c.P; ++p) dh[static_cast<size_t>(i * PF + p * F + f)] *= weight * d_a[at];
      }
      for (int64_t j = 0; j < PF; ++j) {
        want["d_b_in"][static_cast<size_t>(e * PF + j)] += dh[static_cast<size_t>(i * PF + j)];
      }
    }
    in.add_gradients(e, x, dh, m);
    out.add_gradients(e, weighted_a, d_y, m);
    scatter("y", y, D);
    scatter("a", down, F);
    scatter("h", h, PF);
    scatter("lora_u", in.u(e, x, m), c.rank_in);
    scatter("lora_z", out.u(e, down, m), c.rank_out);
    scatter("dh", dh, PF);
    scatter("weighted_a", weighted_a, F);
    scatter("lora_v_in", in.v(e, dh, m), c.rank_in);
    scatter("lora_v_out", out.v(e, d_y, m), c.rank_out);
    scatter("dx_rows", in.d_x(e, dh, m), D);
  }
  want["d_w_in"] = in.d_w;
  want["d_lora_a_in"] = in.d_a;
  want["d_lora_b_in"] = in.d_b;
  want["d_w_out"] = out.d_w;
  want["d_lora_a_out"] = out.d_a;
  want["d_lora_b_out"] = out.d_b;
  return want;
}

inline LoraCase in_dtype(int32_t dtype, int32_t factor_dtype) {
  LoraCase c;
  c.dtype = dtype;
  c.factor_dtype = factor_dtype;
  return c;
}

// Roundings of u, h, a and the factors add up.
inline double bound_of(int32_t dtype) { return dtype == AB_FLOAT32 ? 2e-6 : 6 * rounding_of(dtype); }

inline LoraCase in_fp8(int32_t dtype) {
  LoraCase c = in_dtype(dtype, dtype);
  c.precision = AB_PRECISION_FP8;
  c.D = c.F = 128;
  return c;
}

inline void expect_same(LoraNetwork& got, LoraNetwork& want, const std::string& what,
                        const std::vector<std::string>& without = {}) {
  for (const auto& [name, tensor] : got.tensors) {
    if (std::ranges::find(without, name) != without.end()) continue;
    EXPECT_TRUE(tensor.memory().is(want[name].memory())) << what << ": " << name;
  }
}

}  // namespace anabranch::testing
