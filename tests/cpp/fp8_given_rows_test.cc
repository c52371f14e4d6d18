// Expert MLPs whose tokens and cotangents are passed in already quantised.
#include "fp8_network.h"

namespace anabranch::testing {
namespace {

// The quantised tokens and cotangents of a network.
struct GivenRows {
  QuantizedTensor x, d_out;

  explicit GivenRows(const QuantizedNetwork& net) : x(net.x.view(), net.kind), d_out(net.d_out.view(), net.kind) {}

  void pass_to(ab_expert_ffn_forward_args* args) const {
    args->x = nullptr;
    args->x_q = x.q.view();
    args->x_scales = x.scales.view();
  }
  void pass_to(ab_expert_ffn_backward_args* args) const {
    args->d_out_q = d_out.q.view();
    args->d_out_scales = d_out.scales.view();
  }
};

TEST(Fp8, QuantisedRowsMatchQuantisingInTheCall) {
  for (const int32_t kind : {AB_FP8_SCALES_FLOAT32, AB_FP8_SCALES_POWER_OF_TWO}) {
    const QuantizedNetwork want(2, kind), net(2, kind);
    want.compute();
    const GivenRows rows(net);
    for (ab_expert_ffn_forward_args args : {net.up_and_down(), net.up()}) {
      rows.pass_to(&args);
      EXPECT_OK(QuantizedNetwork::run(args));
    }
    ab_expert_ffn_backward_args args = net.backward_all();
    rows.pass_to(&args);
    EXPECT_OK(QuantizedNetwork::run(args));
    expect_same_results(net, want);
  }
}

// Without slot_of_row, x has one row per row of the result, and the results determine the dtype of x.
TEST(Fp8, AcceptsQuantisedRowsWithoutSlots) {
  QuantizedNetwork net(1, AB_FP8_SCALES_FLOAT32);
  Floats x({net.R, net.D}), a({net.R, net.F}), want({net.R, net.F});
  for (int64_t i = 0; i < x.size(); ++i) x[i] = net.x[i % net.x.size()];
  const QuantizedTensor given(x.view(), net.kind);
  ab_expert_ffn_forward_args args = net.up();
  args.slot_of_row = nullptr;
  args.topk = 0;
  args.a_scales = args.h = args.b_in = nullptr;
  args.x = x.view();
  args.a = want.view();
  EXPECT_OK(QuantizedNetwork::run(args));
  args.x = nullptr;
  args.x_q = given.q.view();
  args.x_scales = given.scales.view();
  args.a = a.view();
  EXPECT_OK(QuantizedNetwork::run(args));
  EXPECT_EQ(a.values(), want.values());
}

// Only the GEMM reads the quantised d_out; everything else reads d_out.
TEST(Fp8, OnlyTheGemmReadsQuantisedCotangents) {
  const QuantizedNetwork want(2, AB_FP8_SCALES_FLOAT32), net(2, AB_FP8_SCALES_FLOAT32);
  want.compute();
  net.compute();
  const GivenRows rows(net);
  const Floats nothing({net.T, net.D}, std::vector<float>(net.d_out.values().size()));
  ab_expert_ffn_backward_args args = net.backward_all();
  args.b_out = nullptr;  // d_weights would contain <d_out, b_out>
  EXPECT_OK(QuantizedNetwork::run(args));
  const std::vector<float> d_weights = net.d_weights.values();
  rows.pass_to(&args);
  args.d_out = nothing.view();
  EXPECT_OK(QuantizedNetwork::run(args));
  EXPECT_EQ(net.dh.values(), want.dh.values());
  EXPECT_EQ(net.d_weights.values(), d_weights);
  EXPECT_EQ(net.dx_rows.values(), want.dx_rows.values());
  const auto is_zero = [](float value) { return value == 0.0f; };
  EXPECT_TRUE(std::ranges::all_of(net.d_w_out.values(), is_zero));
  EXPECT_TRUE(std::ranges::all_of(net.d_b_out.values(), is_zero));
}

TEST(Fp8, AcceptsQuantisedRowsOfNoTokens) {
  Network<float> net(0, 2, 128, 2, 128, {0, 3}, {-1, -1, -1});
  net.precision = AB_PRECISION_FP8;
  const Bytes q = e4m3({0, 128});
  const Floats scales({0, 1});
  ab_expert_ffn_forward_args forward = net.forward_args();
  forward.x = nullptr;
  forward.x_q = q.view();
  forward.x_scales = scales.view();
  EXPECT_OK(QuantizedNetwork::run(forward));
  ab_expert_ffn_backward_args backward = net.backward_args();
  backward.d_out_q = q.view();
  backward.d_out_scales = scales.view();
  EXPECT_OK(QuantizedNetwork::run(backward));
  EXPECT_TRUE(std::ranges::all_of(net.d_w_in.values(), [](float value) { return value == 0.0f; }));
}

}  // namespace
}  // namespace anabranch::testing
