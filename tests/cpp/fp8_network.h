// An expert MLP in FP8 with all its results.
#pragma once

#include "fp8_operands.h"

namespace anabranch::testing {

// A float32 network and, beside its own results, the quantised results of the FP8 calls.
struct QuantizedNetwork : Network<float> {
  int32_t kind;
  Floats a, weighted_a, a_scales, dh_scales;
  Bytes a_q, dh_q;

  QuantizedNetwork(int64_t parts, int32_t fp8_scales)
      : Network(30, 2, 256, parts, 384, {23, 0, 1, 40}, mixed_slots(70, 60)),
        kind(fp8_scales),
        a({R, F}),
        weighted_a({R, F}),
        a_scales({R, F / kBlock}),
        dh_scales({R, P, F / kBlock}),
        a_q({R, F}, AB_FLOAT8_E4M3),
        dh_q({R, P, F}, AB_FLOAT8_E4M3) {
    precision = AB_PRECISION_FP8;
    vary(x, D, 1);
    vary(d_out, D, 1);
    vary(w_in, P * F, kBlock);
    vary(w_out, D, kBlock);
    for (float& value : w_in.values()) value *= 0.02f;  // keeps activations from saturating
  }

  ab_expert_ffn_forward_args up_and_down() const {
    ab_expert_ffn_forward_args args = forward_args();
    args.fp8_scales = kind;
    return args;
  }
  // Requests only `a`, quantised. Passes the row weights only if they are applied early.
  ab_expert_ffn_forward_args up() const {
    ab_expert_ffn_forward_args args = up_and_down();
    args.y = args.w_out = args.b_out = nullptr;
    if (early == 0) args.weights = nullptr;
    args.a = a_q.view();
    args.a_scales = a_scales.view();
    return args;
  }
  ab_expert_ffn_backward_args backward_all() const {
    ab_expert_ffn_backward_args args = backward_args();
    args.fp8_scales = kind;
    args.weighted_a = weighted_a.view();
    args.dh_q = dh_q.view();
    args.dh_scales = dh_scales.view();
    return args;
  }
  static ab_status run(const ab_expert_ffn_forward_args& args, int threads = 0) {
    return call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, args, threads);
  }
  static ab_status run(const ab_expert_ffn_backward_args& args, int threads = 0) {
    return call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args, threads);
  }
  void compute(int threads = 0) const {
    ab_expert_ffn_forward_args args = up_and_down();
    args.a = a.view();
    EXPECT_OK(run(args, threads));
    EXPECT_OK(run(up(), threads));
    EXPECT_OK(run(backward_all(), threads));
  }
};

inline void expect_same_results(const QuantizedNetwork& got, const QuantizedNetwork& want) {
  const auto all = [](const QuantizedNetwork& net) {
    return std::vector<const Floats*>{&net.y,         &net.h,        &net.dh,       &net.dx_rows,
                                      &net.d_w_in,    &net.d_b_in,   &net.d_w_out,  &net.d_b_out,
                                      &net.d_weights, &net.a_scales, &net.dh_scales};
  };
  for (size_t i = 0; i < all(got).size(); ++i) EXPECT_EQ(all(got)[i]->values(), all(want)[i]->values()) << i;
  EXPECT_EQ(got.a_q.values(), want.a_q.values());
  EXPECT_EQ(got.dh_q.values(), want.dh_q.values());
}

}  // namespace anabranch::testing
