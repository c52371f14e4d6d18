// grouped_matmul_combine against a grouped GEMM followed by combine, bit for bit.
#include <algorithm>

#include "anabranch/dispatch.h"
#include "experts_operands.h"

namespace anabranch::testing {
namespace {

// The rows of a network, and the sums by token of its down and dgrad GEMMs.
template <class T_>
struct Combined {
  const Network<T_>& net;
  Ints row_of_slot;
  Floats addend;
  Tensor<T_> a, want, got;

  explicit Combined(const Network<T_>& network)
      : net(network),
        row_of_slot(invert(net.slot_of_row, net.T, net.K)),
        addend(random({net.T, net.D}, 9)),
        a({net.R, net.F}),
        want({net.T, net.D}),
        got({net.T, net.D}) {}

  static ab_tensor flat_view(const ab_tensor* view, int32_t rank) {
    ab_tensor flat = *view;
    flat.shape[rank - 1] *= flat.shape[rank];
    flat.rank = rank;
    return flat;
  }

  // Compares combine on the finished rows with the single operation.
  void expect_same(const Tensor<T_>& rows, ab_grouped_matmul_combine_args args) {
    const ab_tensor* weights = args.weight_early != 0 ? nullptr : args.weights;
    const ab_combine_args sum{sizeof(sum), rows.view(), args.row_of_slot, weights, want.view(), args.addend};
    EXPECT_OK(call(ab_combine, ab_combine_workspace, sum));
    for (const int threads : {1, 3}) {
      std::fill(got.values().begin(), got.values().end(), T_{});
      EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args, threads));
      EXPECT_EQ(got.values(), want.values());
    }
  }

  ab_grouped_matmul_combine_args args() const {
    ab_grouped_matmul_combine_args args{};
    args.size = sizeof(args);
    args.x = a.view();
    args.w = net.w_out.view();
    args.group_sizes = net.group_sizes.view();
    args.slot_of_row = net.slot_of_row.view();
    args.row_of_slot = row_of_slot.view();
    args.weights = net.weights.view();
    args.out = got.view();
    return args;
  }

  // weights: 0 none, 1 late (in the sum), 2 early (in `a`).
  void check_down(bool biased, int weights, bool adds) {
    ab_expert_ffn_forward_args forward = net.forward_args();
    forward.a = a.view();
    forward.weight_early = weights == 2 ? 1 : 0;
    if (!biased) forward.b_out = nullptr;
    if (weights != 2) forward.weights = nullptr;
    EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward));
    ab_grouped_matmul_combine_args down = args();
    down.weight_early = forward.weight_early;
    down.bias = forward.b_out;
    if (weights == 0) down.weights = nullptr;
    if (adds) down.addend = addend.view();
    expect_same(net.y, down);

    const std::vector<T_> a_with_y = a.values();
    std::fill(a.values().begin(), a.values().end(), T_{1});
    forward.y = forward.w_out = forward.b_out = nullptr;
    EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward));
    EXPECT_EQ(a.values(), a_with_y) << "`a` requested without y";
  }

  void check_dgrad(bool adds) {
    EXPECT_OK(net.forward());
    EXPECT_OK(net.backward());
    const ab_tensor dh = flat_view(net.dh.view(), 2);
    const ab_tensor w_in = flat_view(net.w_in.view(), 3);
    ab_grouped_matmul_combine_args dgrad = args();
    dgrad.transpose_w = 1;
    dgrad.x = &dh;
    dgrad.w = &w_in;
    dgrad.weights = nullptr;
    if (adds) dgrad.addend = addend.view();
    expect_same(net.dx_rows, dgrad);
  }
};

template <class T_>
void check_combined(const Network<T_>& net) {
  Combined<T_> combined(net);
  for (const bool adds : {false, true}) {
    combined.check_dgrad(adds);
    for (const int weights : {0, 1, 2}) {
      for (const bool biased : {false, true}) combined.check_down(biased, weights, adds);
    }
  }
}

TEST(GroupedMatmulCombine, MatchesGemmAndCombine) {
  check_combined(Network<float>(20, 3, 33, 2, 24, {7, 0, 1, 40, 9}, mixed_slots(70, 60)));
  check_combined(Network<uint16_t>(20, 3, 33, 2, 24, {7, 0, 1, 40, 9}, mixed_slots(70, 60)));
  check_combined(Network<uint16_t>(300, 2, 600, 1, 130, {200, 0, 300, 90}, mixed_slots(600, 600)));
  check_combined(Network<float>(5, 2, 8, 2, 8, {0, 0}, mixed_slots(6, 10)));
}

TEST(GroupedMatmulCombine, AcceptsEmptySizes) {
  check_combined(Network<float>(3, 2, 4, 2, 5, {1, 0}, {}));
  check_combined(Network<float>(0, 2, 4, 2, 5, {1, 0}, {-1, -1}));
  check_combined(Network<float>(3, 2, 0, 2, 5, {1, 0}, slots_in_order(4)));
  check_combined(Network<float>(3, 2, 4, 2, 0, {1, 0}, slots_in_order(4)));
  check_combined(Network<float>(3, 2, 4, 2, 5, {}, slots_in_order(4)));
}

TEST(GroupedMatmulCombine, AcceptsABiasWithTransposedWeights) {
  const Network<float> net(20, 3, 33, 2, 24, {7, 0, 1, 40, 9}, mixed_slots(70, 60));
  Combined<float> combined(net);
  ab_expert_ffn_forward_args forward = net.forward_args();
  forward.a = combined.a.view();
  EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward));
  Floats transposed({net.E, net.D, net.F});
  for (int64_t i = 0; i < transposed.size(); ++i) {
    const int64_t e = i / (net.D * net.F);
    transposed[i] = net.w_out[(e * net.F + i % net.F) * net.D + i / net.F % net.D];
  }
  ab_grouped_matmul_combine_args args = combined.args();
  args.bias = net.b_out.view();
  EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args));
  const std::vector<double> want(combined.got.values().begin(), combined.got.values().end());
  args.transpose_w = 1;
  args.w = transposed.view();
  EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args));
  expect_near(combined.got, want, 1e-6, "out");
}

// With garbage indices nothing is accessed out of bounds (under AddressSanitizer), and the sums match two operations.
TEST(GroupedMatmulCombine, ToleratesGarbageIndices) {
  const Network<float> net(20, 3, 33, 2, 24, {INT32_MAX, -5, 3, INT32_MIN}, mixed_slots(70, 60));
  Combined<float> combined(net);
  for (int64_t slot = 0; slot < 60; ++slot) {
    combined.row_of_slot[slot] = static_cast<int32_t>(slot % 7 == 0 ? INT32_MIN : slot % 7 == 1 ? 70 : slot * 5 - 40);
  }
  combined.check_down(true, 1, false);
  combined.check_dgrad(true);
}

TEST(GroupedMatmulCombine, OutMayAliasTheAddend) {
  const Network<float> net(20, 3, 33, 2, 24, {7, 0, 1, 40, 9}, mixed_slots(70, 60));
  Combined<float> combined(net);
  combined.check_down(false, 1, true);
  ab_grouped_matmul_combine_args args = combined.args();
  args.out = args.addend = combined.addend.view();
  EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args));
  EXPECT_EQ(combined.addend.values(), combined.want.values());
}

// The CPU computes in full precision even if a lower one is allowed.
TEST(GroupedMatmulCombine, EveryPrecisionHasTheSameBits) {
  const Network<float> net(20, 3, 33, 2, 24, {7, 0, 1, 40, 9}, mixed_slots(70, 60));
  Combined<float> combined(net);
  combined.check_down(true, 1, false);
  ab_grouped_matmul_combine_args args = combined.args();
  args.bias = net.b_out.view();
  args.precision = AB_PRECISION_TF32;
  std::fill(combined.got.values().begin(), combined.got.values().end(), 0.0f);
  EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args));
  EXPECT_EQ(combined.got.values(), combined.want.values());
}

TEST(GroupedMatmulCombine, RefusesBadArguments) {
  const Network<float> net(2, 2, 3, 2, 4, {3, 1}, slots_in_order(4));
  const Combined<float> combined(net);
  const auto refused = [&](auto change, const char* text) {
    ab_grouped_matmul_combine_args args = combined.args();
    args.bias = net.b_out.view();
    args.addend = combined.addend.view();
    change(args);
    EXPECT_REFUSED(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args), AB_INVALID_ARGUMENT,
                   text);
  };
  const Floats odd({1, 1});
  const Ints odd_ints({1, 1});
  refused([](auto& args) { args.size = 8; }, "ab_grouped_matmul_combine_args: got size 8, expected");
  refused([](auto& args) { args.transpose_w = 2; }, "transpose_w: got 2, expected 0 or 1");
  refused([](auto& args) { args.transpose_w = 1; }, "w: got float32 (8) [2, 4, 3], expected float32 [E=2, N, D=4]");
  refused([](auto& args) { args.weight_early = 2; }, "weight_early: got 2, expected 0, or 1 together with weights");
  refused(
      [](auto& args) {
        args.weight_early = 1;
        args.weights = nullptr;
      },
      "weight_early: got 1, expected 0, or 1 together with weights");
  refused([](auto& args) { args.precision = 3; }, "precision: got 3, expected 0 to 2, an ab_precision");
  refused([](auto& args) { args.x = nullptr; }, "x: got NULL, expected");
  refused([&](auto& args) { args.w = odd.view(); }, "w: got float32 (8) [1, 1], expected float32 [E=2, D=4, N]");
  refused([&](auto& args) { args.group_sizes = odd.view(); },
          "group_sizes: got float32 (8) [1, 1], expected int32 [E]");
  refused([&](auto& args) { args.bias = odd.view(); }, "bias: got float32 (8) [1, 1], expected float32 [E=2, N=3]");
  refused([](auto& args) { args.slot_of_row = nullptr; }, "slot_of_row: got NULL, expected int32 [R=4]");
  refused([&](auto& args) { args.slot_of_row = odd_ints.view(); }, "slot_of_row: got int32 (4) [1, 1], expected");
  refused([](auto& args) { args.row_of_slot = nullptr; }, "row_of_slot: got NULL, expected int32 [T, K]");
  refused([&](auto& args) { args.weights = odd.view(); }, "weights: got float32 (8) [1, 1], expected");
  refused([&](auto& args) { args.addend = odd.view(); }, "addend: got float32 (8) [1, 1], expected");
  refused([&](auto& args) { args.out = odd.view(); }, "out: got float32 (8) [1, 1], expected");
  refused([](auto& args) { args.out = nullptr; }, "out: got NULL, expected");
  const ab_grouped_matmul_combine_args args = combined.args();
  EXPECT_REFUSED(ab_grouped_matmul_combine(&args, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
  EXPECT_REFUSED(ab_grouped_matmul_combine(nullptr, nullptr), AB_INVALID_ARGUMENT, "got NULL");
}

}  // namespace
}  // namespace anabranch::testing
