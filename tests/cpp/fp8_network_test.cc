// Expert MLPs in FP8 against float64 GEMMs of the dequantised operands.
#include "fp8_network.h"
#include "anabranch/dispatch.h"

namespace anabranch::testing {
namespace {

// Computes every result in float64 from the network's own earlier results, so that errors do not add up.
struct Expected {
  const QuantizedNetwork& net;
  std::vector<int64_t> offsets;
  std::vector<double> h, a, y, dh, weighted_a, dx_rows, d_w_in, d_b_in, d_w_out, d_b_out, d_weights;
  QuantizedMatrix a_q, dh_q;

  explicit Expected(const QuantizedNetwork& network)
      : net(network),
        offsets(offsets_of(net.group_sizes.values(), net.R)),
        h(zeros(net.h)),
        a(zeros(net.a)),
        y(zeros(net.y)),
        dh(zeros(net.dh)),
        weighted_a(zeros(net.a)),
        dx_rows(zeros(net.dx_rows)),
        d_w_in(zeros(net.d_w_in)),
        d_b_in(zeros(net.d_b_in)),
        d_w_out(zeros(net.d_w_out)),
        d_b_out(zeros(net.d_b_out)),
        d_weights(zeros(net.d_weights)),
        a_q(quantize(net.a.values(), net.F, 1, net.kind)),
        dh_q(quantize(net.dh.values(), net.F, 1, net.kind)) {
    const std::vector<double> x = quantize(net.x.values(), net.D, 1, net.kind).values;
    const std::vector<double> d_out = quantize(net.d_out.values(), net.D, 1, net.kind).values;
    for (int64_t e = 0; e < net.E; ++e) expert(e, x, d_out);
  }

  static std::vector<double> zeros(const Floats& like) { return std::vector<double>(like.values().size()); }
  static std::span<const double> row(const std::vector<double>& matrix, int64_t r, int64_t columns) {
    return std::span(matrix).subspan(static_cast<size_t>(r * columns), static_cast<size_t>(columns));
  }

  void expert(int64_t e, const std::vector<double>& x, const std::vector<double>& d_out) {
    const int64_t D = net.D, P = net.P, F = net.F;
    std::vector<double> w_in(static_cast<size_t>(D * P * F));
    for (int64_t p = 0; p < P; ++p) {
      std::vector<float> part;
      for (int64_t i = 0; i < D * F; ++i) part.push_back(net.w_in[((e * D + i / F) * P + p) * F + i % F]);
      const QuantizedMatrix q = quantize(part, F, kBlock, net.kind);
      for (int64_t i = 0; i < D * F; ++i) {
        w_in[static_cast<size_t>((i / F * P + p) * F + i % F)] = q.values[static_cast<size_t>(i)];
      }
    }
    const std::vector<double> w_out = quantize(slice(net.w_out, e * F * D, F * D), D, kBlock, net.kind).values;
    const std::vector<double> w_out_transposed = transposed(w_out, F, D);
    const std::vector<double> w_in_transposed = transposed(w_in, D, P * F);
    for (int64_t r = offsets[static_cast<size_t>(e)]; r < offsets[static_cast<size_t>(e) + 1]; ++r) {
      const int32_t slot = net.slot_of_row[r];
      if (slot < 0 || slot >= net.T * net.K) continue;
      const int64_t t = slot / net.K;
      const double w = net.weights[slot];
      const std::vector<double> h_row = matmul(row(x, t, D), w_in, 1, D, P * F);
      const std::vector<double> y_row = matmul(row(a_q.values, r, F), w_out, 1, F, D);
      const std::vector<double> da_row = matmul(row(d_out, t, D), w_out_transposed, 1, D, F);
      std::vector<double> dh_row(static_cast<size_t>(P * F));
      for (int64_t j = 0; j < P * F; ++j) {
        const auto i = static_cast<size_t>(j);
        h[static_cast<size_t>(r * P * F + j)] = h_row[i] + net.b_in[e * P * F + j];
        dh_row[i] = dh_q.values[static_cast<size_t>(r * P * F + j)];
      }
      const std::vector<double> dx_row = matmul(dh_row, w_in_transposed, 1, P * F, D);
      for (int64_t d = 0; d < D; ++d) {
        const auto i = static_cast<size_t>(r * D + d);
        const double bias = w * net.b_out[e * D + d];
        y[i] = (net.early != 0 ? 1.0 : w) * y_row[static_cast<size_t>(d)] + bias;
        dx_rows[i] = dx_row[static_cast<size_t>(d)];
        d_b_out[static_cast<size_t>(e * D + d)] += w * net.d_out[t * D + d];
        d_weights[static_cast<size_t>(slot)] += net.d_out[t * D + d] * net.b_out[e * D + d];
      }
      for (int64_t f = 0; f < F; ++f) {
        const double gate = net.h[r * P * F + f];
        const double up = P == 1 ? 1.0 : net.h[(r * P + 1) * F + f];
        const double sigmoid = 1 / (1 + std::exp(-gate));
        const double silu = gate * sigmoid;
        const double da = da_row[static_cast<size_t>(f)];
        const auto i = static_cast<size_t>(r * F + f);
        a[i] = silu * up * (net.early != 0 ? w : 1.0);
        weighted_a[i] = w * silu * up;
        d_weights[static_cast<size_t>(slot)] += da * silu * up;
        dh[static_cast<size_t>(r * P * F + f)] = w * da * up * (sigmoid + silu * (1 - sigmoid));
        if (P == 2) dh[static_cast<size_t>((r * P + 1) * F + f)] = w * da * silu;
        for (int64_t d = 0; d < D; ++d) {
          d_w_out[static_cast<size_t>((e * F + f) * D + d)] += weighted_a[i] * net.d_out[t * D + d];
        }
      }
      for (int64_t j = 0; j < P * F; ++j) {
        const double value = dh[static_cast<size_t>(r * P * F + j)];
        d_b_in[static_cast<size_t>(e * P * F + j)] += value;
        for (int64_t d = 0; d < D; ++d) {
          d_w_in[static_cast<size_t>((e * D + d) * P * F + j)] += net.x[t * D + d] * value;
        }
      }
    }
  }

  void compare() const {
    expect_parts_near(net.h, h, net.R, "h");
    expect_parts_near(net.a, a, net.R, "a");
    EXPECT_EQ(net.a_q.values(), a_q.q) << "quantised from float32";
    EXPECT_TRUE(same_bits(net.a_scales.values(), a_q.scales));
    expect_parts_near(net.y, y, net.R, "y");
    expect_parts_near(net.dh, dh, net.R, "dh");
    EXPECT_EQ(net.dh_q.values(), dh_q.q);
    EXPECT_TRUE(same_bits(net.dh_scales.values(), dh_q.scales));
    expect_parts_near(net.weighted_a, weighted_a, net.R, "weighted_a");
    expect_parts_near(net.dx_rows, dx_rows, net.R, "dx_rows");
    expect_parts_near(net.d_w_in, d_w_in, net.E, "d_w_in");
    expect_parts_near(net.d_b_in, d_b_in, net.E, "d_b_in");
    expect_parts_near(net.d_w_out, d_w_out, net.E, "d_w_out");
    expect_parts_near(net.d_b_out, d_b_out, net.E, "d_b_out");
    expect_parts_near(net.d_weights, d_weights, 1, "d_weights");
  }
};

TEST(Fp8, TheNetworkMatchesDequantisedOperands) {
  for (const int32_t early : {0, 1}) {
    QuantizedNetwork net(early == 0 ? 2 : 1, early == 0 ? AB_FP8_SCALES_FLOAT32 : AB_FP8_SCALES_POWER_OF_TWO);
    net.early = early;
    net.compute();
    Expected(net).compare();
  }
}

TEST(Fp8, TheNetworkHasTheSameBitsForEveryThreadCount) {
  const QuantizedNetwork one(2, 0), many(2, 0);
  one.compute(1);
  many.compute(5);
  expect_same_results(many, one);
}

TEST(Fp8, QuantisedWeightsMatchQuantisingInTheCall) {
  const int32_t kind = AB_FP8_SCALES_POWER_OF_TWO;
  const QuantizedNetwork want(2, kind), net(2, kind);
  want.compute();
  const QuantizedWeights w_in(net.w_in.view(), kind), w_out(net.w_out.view(), kind);
  ab_expert_ffn_forward_args whole = net.up_and_down();
  ab_expert_ffn_forward_args half = net.up();
  ab_expert_ffn_backward_args backward = net.backward_all();
  for (auto* args : {&whole, &half}) {
    args->w_in = args->w_out = nullptr;
    args->w_in_q = w_in.q_transposed.view();
    args->w_in_scales = w_in.scales.view();
  }
  whole.w_out_q = w_out.q_transposed.view();
  whole.w_out_scales = w_out.scales.view();
  backward.w_in = backward.w_out = nullptr;
  backward.w_in_q = w_in.q.view();
  backward.w_in_scales = w_in.scales.view();
  backward.w_out_q = w_out.q.view();
  backward.w_out_scales = w_out.scales.view();
  EXPECT_OK(QuantizedNetwork::run(whole));
  EXPECT_OK(QuantizedNetwork::run(half));
  EXPECT_OK(QuantizedNetwork::run(backward));
  expect_same_results(net, want);
}

// Weights whose dtype differs from that of the rows are quantised from their own dtype, without a conversion first.
TEST(Fp8, WeightsMayBeFloat32BesideRowsOfBfloat16) {
  const std::vector<int32_t> slots = mixed_slots(12, 10);
  const Network<uint16_t> net(5, 2, 128, 2, 128, {4, 7}, slots), want(5, 2, 128, 2, 128, {4, 7}, slots);
  const Floats w_in = random({2, 128, 2, 128}, 21), w_out = random({2, 128, 128}, 22);
  const QuantizedWeights w_in_q(w_in.view(), 0), w_out_q(w_out.view(), 0);
  ab_expert_ffn_forward_args forward = want.forward_args(), own = net.forward_args();
  ab_expert_ffn_backward_args backward = want.backward_args(), own_backward = net.backward_args();
  forward.w_in_q = w_in_q.q_transposed.view();
  forward.w_out_q = w_out_q.q_transposed.view();
  backward.w_in_q = w_in_q.q.view();
  backward.w_out_q = w_out_q.q.view();
  forward.w_in_scales = backward.w_in_scales = w_in_q.scales.view();
  forward.w_out_scales = backward.w_out_scales = w_out_q.scales.view();
  own.w_in = own_backward.w_in = w_in.view();
  own.w_out = own_backward.w_out = w_out.view();
  for (auto* args : {&forward, &own}) args->precision = AB_PRECISION_FP8;
  for (auto* args : {&backward, &own_backward}) args->precision = AB_PRECISION_FP8;
  for (const auto& args : {forward, own}) EXPECT_OK(QuantizedNetwork::run(args));
  for (const auto& args : {backward, own_backward}) EXPECT_OK(QuantizedNetwork::run(args));
  EXPECT_EQ(net.y.values(), want.y.values());
  EXPECT_EQ(net.dh.values(), want.dh.values());
  EXPECT_EQ(net.dx_rows.values(), want.dx_rows.values());
  EXPECT_EQ(net.d_w_in.values(), want.d_w_in.values());
}

// The calls of the whole layer: up, then down with the sum by token; dh, then dgrad with the sum by token.
TEST(Fp8, CombinedSumsMatchTheRows) {
  for (const int32_t early : {0, 1}) {
    QuantizedNetwork net(2, AB_FP8_SCALES_FLOAT32);
    net.early = early;
    net.compute();
    const Ints row_of_slot = invert(net.slot_of_row, net.T, net.K);
    const QuantizedWeights w_in(net.w_in.view(), net.kind), w_out(net.w_out.view(), net.kind);
    const Floats got({net.T, net.D}), want({net.T, net.D});
    const auto check_sum = [&](const Floats& rows, ab_grouped_matmul_combine_args args, const ab_tensor* weights) {
      const ab_combine_args sum{sizeof(sum), rows.view(), row_of_slot.view(), weights, want.view(), nullptr};
      EXPECT_OK(call(ab_combine, ab_combine_workspace, sum));
      args.size = sizeof(args);
      args.group_sizes = net.group_sizes.view();
      args.slot_of_row = net.slot_of_row.view();
      args.row_of_slot = row_of_slot.view();
      args.out = got.view();
      args.precision = AB_PRECISION_FP8;
      EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args));
      EXPECT_EQ(got.values(), want.values()) << early;
    };
    ab_grouped_matmul_combine_args down{};
    down.x = net.a_q.view();
    down.x_scales = net.a_scales.view();
    down.w_q = w_out.q_transposed.view();
    down.w_scales = w_out.scales.view();
    if (early != 0) {
      down.bias = net.b_out.view();
      down.weights = net.weights.view();
      down.weight_early = 1;
      check_sum(net.y, down, nullptr);
    } else {
      ab_expert_ffn_forward_args plain = net.up_and_down();  // the sum applies the weights
      plain.weights = nullptr;
      EXPECT_OK(QuantizedNetwork::run(plain));
      down.bias = net.b_out.view();
      down.weights = net.weights.view();
      check_sum(net.y, down, net.weights.view());
    }
    const ab_tensor rows{net.dh_q.view()->data, AB_FLOAT8_E4M3, 2, {net.R, net.P * net.F}, nullptr};
    const ab_tensor scales{net.dh_scales.view()->data, AB_FLOAT32, 2, {net.R, net.P * net.F / kBlock}, nullptr};
    const ab_tensor w_q{w_in.q.view()->data, AB_FLOAT8_E4M3, 3, {net.E, net.D, net.P * net.F}, nullptr};
    const ab_tensor w_scales{
        w_in.scales.view()->data, AB_FLOAT32, 3, {net.E, net.D / kBlock, net.P * net.F / kBlock}, nullptr};
    ab_grouped_matmul_combine_args dgrad{};
    dgrad.transpose_w = 1;
    dgrad.x = &rows;
    dgrad.x_scales = &scales;
    dgrad.w_q = &w_q;
    dgrad.w_scales = &w_scales;
    check_sum(net.dx_rows, dgrad, nullptr);
  }
}

// bfloat16 operands give the same quantised `a` as float32 operands of equal values: `a` is quantised from float32 and
// rounded to bfloat16 only where it is saved. dh is rounded before it is quantised.
TEST(Fp8, AIsQuantisedFromFloat32AndDhFromItsDtype) {
  QuantizedNetwork net32(2, AB_FP8_SCALES_FLOAT32);
  Network<uint16_t> net16(net32.T, net32.K, net32.D, net32.P, net32.F, net32.group_sizes.values(),
                          net32.slot_of_row.values());
  net16.precision = AB_PRECISION_FP8;
  const auto to_float32 = [](const Tensor<uint16_t>& from, Floats& to) {
    for (int64_t i = 0; i < from.size(); ++i) to[i] = to_float(BFloat16{from[i]});
  };
  to_float32(net16.x, net32.x);
  to_float32(net16.w_in, net32.w_in);
  to_float32(net16.b_in, net32.b_in);
  to_float32(net16.w_out, net32.w_out);
  to_float32(net16.b_out, net32.b_out);
  to_float32(net16.d_out, net32.d_out);
  net32.compute();
  const Bytes a_q = e4m3({net32.R, net32.F}), dh_q = e4m3({net32.R, net32.P, net32.F});
  const Floats a_scales({net32.R, net32.F / kBlock}), dh_scales({net32.R, net32.P, net32.F / kBlock});
  ab_expert_ffn_forward_args up = net16.forward_args();
  up.y = up.w_out = up.b_out = up.weights = nullptr;
  up.a = a_q.view();
  up.a_scales = a_scales.view();
  EXPECT_OK(QuantizedNetwork::run(up));
  EXPECT_EQ(a_q.values(), net32.a_q.values());
  EXPECT_EQ(a_scales.values(), net32.a_scales.values());
  for (int64_t i = 0; i < net32.h.size(); ++i) ASSERT_EQ(net16.h[i], from_float<BFloat16>(net32.h[i]).bits);

  ab_expert_ffn_backward_args backward = net16.backward_args();
  backward.dh_q = dh_q.view();
  backward.dh_scales = dh_scales.view();
  EXPECT_OK(QuantizedNetwork::run(backward));
  to_float32(net16.dh, net32.dh);
  const QuantizedMatrix dh = quantize(net32.dh.values(), net32.F, 1, AB_FP8_SCALES_FLOAT32);
  EXPECT_EQ(dh_q.values(), dh.q);
  EXPECT_TRUE(same_bits(dh_scales.values(), dh.scales));

  // dx_rows, computed from that dh, matches the one of float32 operands.
  ab_expert_ffn_backward_args dx_args = net32.backward_all();
  dx_args.h = nullptr;
  dx_args.d_weights = nullptr;
  dx_args.dh_q = dx_args.dh_scales = nullptr;
  EXPECT_OK(QuantizedNetwork::run(dx_args));
  for (int64_t i = 0; i < net32.dx_rows.size(); ++i) {
    ASSERT_EQ(net16.dx_rows[i], from_float<BFloat16>(net32.dx_rows[i]).bits);
  }
}

// The first call computes dh. The second computes the gradients that depend on it from dh_q, or from dh in float32.
TEST(Fp8, BackwardInTwoCallsMatchesOne) {
  const QuantizedNetwork want(2, AB_FP8_SCALES_FLOAT32);
  want.compute();
  for (const bool passes_dh_q : {true, false}) {
    const QuantizedNetwork net(2, AB_FP8_SCALES_FLOAT32);
    EXPECT_OK(QuantizedNetwork::run(net.up_and_down()));
    EXPECT_OK(QuantizedNetwork::run(net.up()));
    ab_expert_ffn_backward_args first = net.backward_all();
    first.dx_rows = first.d_w_in = first.d_w_out = first.d_b_in = first.d_b_out = nullptr;
    ab_expert_ffn_backward_args second = net.backward_all();
    second.h = nullptr;
    second.d_weights = nullptr;
    if (!passes_dh_q) second.dh_q = second.dh_scales = nullptr;
    EXPECT_OK(QuantizedNetwork::run(first));
    EXPECT_OK(QuantizedNetwork::run(second));
    expect_same_results(net, want);
  }
}

TEST(Fp8, AcceptsEmptySizes) {
  for (const auto& [D, F] : {std::pair{0, 128}, std::pair{128, 0}, std::pair{0, 0}}) {
    Network<float> net(3, 2, D, 2, F, {2, 0, 4}, slots_in_order(6));
    net.precision = AB_PRECISION_FP8;
    EXPECT_OK(net.forward());
    EXPECT_OK(net.backward());
    for (const float y : net.y.values()) EXPECT_FALSE(std::isnan(y));
  }
  Network<float> nothing(0, 2, 128, 2, 128, {0, 3}, {});
  nothing.precision = AB_PRECISION_FP8;
  EXPECT_OK(nothing.forward());
  EXPECT_OK(nothing.backward());
  EXPECT_TRUE(std::ranges::all_of(nothing.d_w_in.values(), [](float value) { return value == 0.0f; }));
}

}  // namespace
}  // namespace anabranch::testing
