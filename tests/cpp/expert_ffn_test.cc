// Tests of the expert MLP, forward and backward.
#include <algorithm>
#include <cmath>
#include <string>

#include "experts_operands.h"
#include "two_calls.h"

namespace anabranch::testing {
namespace {

template <class T_>
void expect_same_results(const Network<T_>& a, const Network<T_>& b, const std::string& what) {
  EXPECT_EQ(a.y.values(), b.y.values()) << what;
  EXPECT_EQ(a.h.values(), b.h.values()) << what;
  EXPECT_EQ(a.dh.values(), b.dh.values()) << what;
  EXPECT_EQ(a.dx_rows.values(), b.dx_rows.values()) << what;
  EXPECT_EQ(a.d_w_in.values(), b.d_w_in.values()) << what;
  EXPECT_EQ(a.d_b_in.values(), b.d_b_in.values()) << what;
  EXPECT_EQ(a.d_w_out.values(), b.d_w_out.values()) << what;
  EXPECT_EQ(a.d_b_out.values(), b.d_b_out.values()) << what;
  EXPECT_EQ(a.d_weights.values(), b.d_weights.values()) << what;
}

template <class T_>
void expect_thread_independence(const std::vector<int32_t>& sizes, int64_t D, int64_t F) {
  const auto R = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  Network<T_> one(R / 2, 2, D, 2, F, sizes, slots_in_order(R));
  EXPECT_OK(one.forward(1));
  EXPECT_OK(one.backward(1));
  for (const int threads : {1, 2, 3, 8}) {
    Network<T_> many(R / 2, 2, D, 2, F, sizes, slots_in_order(R));
    EXPECT_OK(many.forward(threads));
    EXPECT_OK(many.backward(threads));
    expect_same_results(one, many, std::to_string(threads) + " threads");
  }
}

TEST(ExpertFfn, HasTheSameBitsForEveryThreadCount) {
  expect_thread_independence<float>({300, 0, 1, 99}, 72, 140);
  expect_thread_independence<float>({400}, 130, 300);
  expect_thread_independence<uint16_t>({300, 0, 1, 99}, 72, 140);
}

bool all_zero(const float* values, int64_t count) {
  return std::all_of(values, values + count, [](float value) { return value == 0.0f; });
}

// An entry of slot_of_row outside [0, T K) is a padding row wherever it is; the other rows are unaffected.
TEST(ExpertFfn, InvalidSlotsArePadding) {
  const int64_t T = 3;
  const int64_t K = 2;
  const std::vector<int32_t> slots = {4, -1, 0, INT32_MAX, INT32_MIN, 3, 6, -7, 5, 1, 9};
  Network<float> net(T, K, 5, 2, 4, {4, 0, 6}, slots);  // one row past the groups
  net.early = 1;
  EXPECT_OK(net.forward());
  EXPECT_OK(net.backward());
  Network<float> dense(T, K, 5, 2, 4, {2, 0, 3}, {4, 0, 3, 5, 1});
  dense.early = 1;
  EXPECT_OK(dense.forward());
  EXPECT_OK(dense.backward());

  int64_t real = 0;
  for (int64_t r = 0; r < net.R; ++r) {
    const int32_t slot = slots[static_cast<size_t>(r)];
    if (slot < 0 || slot >= T * K || r >= 10) {
      EXPECT_TRUE(all_zero(&net.y[r * 5], 5)) << "y " << r;
      EXPECT_TRUE(all_zero(&net.h[r * 8], 8)) << "h " << r;
      EXPECT_TRUE(all_zero(&net.dh[r * 8], 8)) << "dh " << r;
      EXPECT_TRUE(all_zero(&net.dx_rows[r * 5], 5)) << "dx " << r;
      continue;
    }
    for (int64_t d = 0; d < 5; ++d) {
      EXPECT_NEAR(net.y[r * 5 + d], dense.y[real * 5 + d], 1e-5f) << "y " << r;
      EXPECT_NEAR(net.dx_rows[r * 5 + d], dense.dx_rows[real * 5 + d], 1e-5f) << "dx " << r;
    }
    ++real;
  }
  EXPECT_EQ(real, 5);
  for (int64_t i = 0; i < net.d_w_in.size(); ++i) EXPECT_NEAR(net.d_w_in[i], dense.d_w_in[i], 1e-5f);
  for (int64_t i = 0; i < net.d_w_out.size(); ++i) EXPECT_NEAR(net.d_w_out[i], dense.d_w_out[i], 1e-5f);
  for (int64_t i = 0; i < net.d_b_out.size(); ++i) EXPECT_NEAR(net.d_b_out[i], dense.d_b_out[i], 1e-5f);
  for (int64_t i = 0; i < net.d_weights.size(); ++i) EXPECT_NEAR(net.d_weights[i], dense.d_weights[i], 1e-5f);
  EXPECT_EQ(net.d_weights[2], 0.0f);  // slot 2 has no row
}

TEST(ExpertFfn, GroupSizesAreClippedToTheRows) {
  for (const std::vector<int32_t>& sizes :
       {std::vector<int32_t>{-3, INT32_MAX, INT32_MAX}, {INT32_MIN, 2, -1}, {5, INT32_MAX, 7}}) {
    Network<float> garbage(3, 2, 5, 1, 4, sizes, slots_in_order(6));
    EXPECT_OK(garbage.forward());
    EXPECT_OK(garbage.backward());
    const std::vector<int64_t> offsets = offsets_of(sizes, 6);
    std::vector<int32_t> clipped;
    for (size_t e = 0; e < 3; ++e) clipped.push_back(static_cast<int32_t>(offsets[e + 1] - offsets[e]));
    Network<float> clean(3, 2, 5, 1, 4, clipped, slots_in_order(6));
    EXPECT_OK(clean.forward());
    EXPECT_OK(clean.backward());
    expect_same_results(garbage, clean, "clipped sizes");
  }
}

TEST(ExpertFfn, NanInAWeightStaysOutOfPaddingAndOtherExperts) {
  Network<float> net(2, 1, 3, 2, 4, {2, 1}, {0, -1, 1});
  net.w_out[0] = NAN;
  net.w_in[0] = NAN;
  EXPECT_OK(net.forward());
  EXPECT_OK(net.backward());
  EXPECT_TRUE(std::isnan(net.y[0]));
  EXPECT_TRUE(all_zero(&net.y[3], 3));
  EXPECT_TRUE(all_zero(&net.dx_rows[3], 3));
  for (int64_t d = 0; d < 3; ++d) EXPECT_TRUE(std::isfinite(net.y[6 + d]));
  for (int64_t i = 0; i < 3 * 8; ++i) EXPECT_TRUE(std::isfinite(net.d_w_in[3 * 8 + i]));
}

TEST(ExpertFfn, DhMayAliasH) {
  Network<float> separate(70, 2, 33, 2, 150, {60, 0, 80}, slots_in_order(140));
  EXPECT_OK(separate.forward());
  EXPECT_OK(separate.backward());
  Network<float> aliased(70, 2, 33, 2, 150, {60, 0, 80}, slots_in_order(140));
  EXPECT_OK(aliased.forward());
  ab_expert_ffn_backward_args args = aliased.backward_args();
  args.dh = aliased.h.view();
  EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args));
  EXPECT_EQ(aliased.h.values(), separate.dh.values());
  EXPECT_EQ(aliased.dx_rows.values(), separate.dx_rows.values());
  EXPECT_EQ(aliased.d_w_in.values(), separate.d_w_in.values());
  EXPECT_EQ(aliased.d_w_out.values(), separate.d_w_out.values());
  EXPECT_EQ(aliased.d_weights.values(), separate.d_weights.values());
}

TEST(ExpertFfn, TwoCallsMatchOne) {
  using A = ab_expert_ffn_backward_args;
  Network<float> one(70, 2, 33, 2, 150, {60, 0, 70}, slots_in_order(140));
  EXPECT_OK(one.forward());
  EXPECT_OK(one.backward());
  for (const bool w_out_comes_first : {false, true}) {
    Network<float> two(70, 2, 33, 2, 150, {60, 0, 70}, slots_in_order(140));
    EXPECT_OK(two.forward());
    const Floats weighted_a({140, 150});
    const auto [first, second] = in_two_calls(two.backward_args(), weighted_a.view(), w_out_comes_first);
    EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, first));
    EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, second));
    expect_same_results(two, one, "in two calls");
    for (int64_t i = 130 * 150; i < 140 * 150; ++i) ASSERT_EQ(weighted_a[i], 0.0f) << "past the groups";

    const auto refused = [&last = second](auto change, const char* text) {
      A args = last;
      change(args);
      EXPECT_REFUSED(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args), AB_INVALID_ARGUMENT, text);
    };
    refused([](A& args) { args.dh = nullptr; }, "h: got NULL, expected [R, P, F], or dh from an earlier call");
    refused([&](A& args) { args.d_weights = two.d_weights.view(); },
            "d_weights: got a tensor, expected NULL without h");
    refused([](A& args) { args.dx_rows = args.d_w_in = args.d_b_in = nullptr; },
            "dh: got a tensor, expected NULL without h and outputs that depend on dh");
    refused([](A& args) { args.skip_rest = 1; }, "skip_rest: got 1, expected 0 without h");
    refused([](A& args) { args.skip_rest = 2; }, "skip_rest: got 2, expected 0 or 1");
    if (w_out_comes_first) {
      refused([&](A& args) { args.d_out = two.d_out.view(); },
              "d_out: got a tensor, expected NULL without h, d_w_out, d_b_out, d_lora_a_out and d_lora_b_out");
      refused([&](A& args) { args.weighted_a = weighted_a.view(); },
              "weighted_a: got a tensor, expected NULL without h, d_w_out, d_lora_a_out and d_lora_b_out");
    } else {
      refused([](A& args) { args.d_out = nullptr; }, "d_out: got NULL, expected");
      refused([](A& args) { args.weighted_a = nullptr; },
              "h: got NULL, expected [R, P, F], or weighted_a from an earlier call");
      refused([&](A& args) { args.weighted_a = two.h.view(); }, "weighted_a: got float32 (8) [140, 2, 150], expected");
    }
  }
}

// A backward call without h ignores the contents of padding rows of dh and weighted_a, inside the groups and past them.
TEST(ExpertFfn, PaddingRowsOfTheSecondCallAreIgnored) {
  const std::vector<int32_t> slots = {4, -1, 0, 7, 3, -1, 2};
  Network<float> one(3, 2, 5, 2, 6, {3, 2}, slots);
  EXPECT_OK(one.forward());
  EXPECT_OK(one.backward());
  Network<float> two(3, 2, 5, 2, 6, {3, 2}, slots);
  EXPECT_OK(two.forward());
  Floats weighted_a({7, 6});
  const auto [first, second] = in_two_calls(two.backward_args(), weighted_a.view(), false);
  EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, first));
  for (const int64_t r : {1, 3, 5, 6}) {
    std::fill_n(&two.dh[r * 12], 12, 3.0f);
    std::fill_n(&weighted_a[r * 6], 6, 3.0f);
  }
  EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, second));
  two.dh.values() = one.dh.values();
  expect_same_results(two, one, "with padding");
}

TEST(ExpertFfn, EachOutputIsTheSameAlone) {
  Network<float> all(7, 2, 6, 2, 5, {6, 0, 8}, slots_in_order(14));
  EXPECT_OK(all.forward());
  EXPECT_OK(all.backward());
  Network<float> one(7, 2, 6, 2, 5, {6, 0, 8}, slots_in_order(14));
  ab_expert_ffn_forward_args forward = one.forward_args();
  forward.h = nullptr;
  EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward));
  EXPECT_EQ(one.y.values(), all.y.values());
  EXPECT_OK(one.forward());
  const auto check_alone = [&](const ab_tensor* ab_expert_ffn_backward_args::* requested) {
    ab_expert_ffn_backward_args args = one.backward_args();
    const ab_tensor* view = args.*requested;
    args.dh = args.dx_rows = args.d_w_in = args.d_b_in = args.d_w_out = args.d_b_out = args.d_weights = nullptr;
    args.*requested = view;
    EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args));
  };
  check_alone(&ab_expert_ffn_backward_args::dh);
  check_alone(&ab_expert_ffn_backward_args::dx_rows);
  check_alone(&ab_expert_ffn_backward_args::d_w_in);
  check_alone(&ab_expert_ffn_backward_args::d_b_in);
  check_alone(&ab_expert_ffn_backward_args::d_w_out);
  check_alone(&ab_expert_ffn_backward_args::d_b_out);
  check_alone(&ab_expert_ffn_backward_args::d_weights);
  expect_same_results(one, all, "each output alone");
}

// Gradients of weights may be float32 whatever the other dtypes are; accumulate then adds to them.
template <class T_>
void expect_accumulated_weights() {
  const Network<T_> net(7, 2, 6, 2, 5, {6, 0, 8}, slots_in_order(14));
  EXPECT_OK(net.forward());
  const std::vector<int64_t> in = {3, 6, 2, 5};
  const std::vector<int64_t> out = {3, 5, 6};
  const Floats gradients[2] = {Floats(in), Floats(out)};
  const Floats before[2] = {random(in, 8), random(out, 9)};
  const Floats sums[2] = {random(in, 8), random(out, 9)};
  ab_expert_ffn_backward_args args = net.backward_args();
  args.d_w_in = gradients[0].view();
  args.d_w_out = gradients[1].view();
  EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args));
  args.accumulate = 1;
  args.d_w_in = sums[0].view();
  args.d_w_out = sums[1].view();
  EXPECT_OK(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, args));
  for (const int i : {0, 1}) expect_accumulated(sums[i], before[i], gradients[i]);
}

TEST(ExpertFfn, GradientsOfWeightsAccumulate) {
  expect_accumulated_weights<float>();
  expect_accumulated_weights<uint16_t>();
}

// The CPU computes in full precision even if a lower one is allowed.
TEST(ExpertFfn, EveryPrecisionHasTheSameBits) {
  const Network<float> highest(70, 2, 33, 2, 150, {60, 0, 80}, slots_in_order(140));
  EXPECT_OK(highest.forward());
  EXPECT_OK(highest.backward());
  Network<float> rounded(70, 2, 33, 2, 150, {60, 0, 80}, slots_in_order(140));
  rounded.precision = AB_PRECISION_TF32;
  EXPECT_OK(rounded.forward());
  EXPECT_OK(rounded.backward());
  expect_same_results(rounded, highest, "precision");
}

TEST(ExpertFfn, ExpertsWithoutRowsGetZeroGradients) {
  Network<float> net(2, 1, 3, 2, 4, {0, 2, 0}, {0, 1});
  EXPECT_OK(net.forward());
  EXPECT_OK(net.backward());
  for (const int64_t e : {0, 2}) {
    EXPECT_TRUE(all_zero(&net.d_w_in[e * 24], 24));
    EXPECT_TRUE(all_zero(&net.d_b_in[e * 8], 8));
    EXPECT_TRUE(all_zero(&net.d_w_out[e * 12], 12));
    EXPECT_TRUE(all_zero(&net.d_b_out[e * 3], 3));
  }
  EXPECT_FALSE(all_zero(&net.d_w_in[24], 24));
}

TEST(ExpertFfn, AcceptsEmptySizes) {
  for (const int64_t R : {0, 3}) {
    for (const int64_t F : {0, 4}) {
      Network<float> net(R, 1, 3, 2, F, {2, 1}, slots_in_order(R));
      EXPECT_OK(net.forward());
      EXPECT_OK(net.backward());
      EXPECT_TRUE(R > 0 || all_zero(net.d_w_out.values().data(), net.d_w_out.size()));
      if (F > 0) continue;
      for (int64_t i = 0; i < net.y.size(); ++i) {
        EXPECT_EQ(net.y[i], net.weights[i / 3] * net.b_out[i / 6 * 3 + i % 3]);  // row r: expert r / 2
      }
      for (int64_t r = 0; r < R; ++r) {  // <d_y, b_out>
        float product = 0;
        for (int64_t d = 0; d < 3; ++d) product += net.d_out[r * 3 + d] * net.b_out[r / 2 * 3 + d];
        EXPECT_NEAR(net.d_weights[r], product, 1e-6f);
      }
    }
  }
}

TEST(ExpertFfn, AssignmentsWithoutRowsGetZeroGradients) {
  Network<float> net(3, 2, 4, 2, 5, {1, 0}, {});
  EXPECT_OK(net.forward());
  EXPECT_OK(net.backward());
  EXPECT_TRUE(all_zero(net.d_weights.values().data(), net.d_weights.size()));
}

TEST(ExpertFfn, RefusesBadArguments) {
  Network<float> net(2, 2, 3, 2, 4, {3, 1}, slots_in_order(4));
  const auto refused = [&](auto change, const char* text) {
    ab_expert_ffn_forward_args forward = net.forward_args();
    change(forward);
    EXPECT_REFUSED(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, forward), AB_INVALID_ARGUMENT, text);
    ab_expert_ffn_backward_args backward = net.backward_args();
    change(backward);
    EXPECT_REFUSED(call(ab_expert_ffn_backward, ab_expert_ffn_backward_workspace, backward), AB_INVALID_ARGUMENT, text);
  };
  const Floats odd({1, 1});
  const Tensor<uint16_t> bf16({2, 3, 2, 4});
  const Floats three_parts({2, 3, 3, 4});
  refused([](auto& args) { args.size = 1; }, "_args: got size 1, expected");
  refused([](auto& args) { args.activation = 11; }, "activation: got 11, expected 0 to 10, an ab_activation");
  refused([](auto& args) { args.activation = -1; }, "activation: got -1, expected 0 to 10, an ab_activation");
  refused([](auto& args) { args.activation_alpha = 1.0f; },
          "activation_alpha: got 1, expected 0: the activation has no such parameter");
  refused([](auto& args) { args.activation_limit = 1.0f; },
          "activation_limit: got 1, expected 0: the activation has no such parameter");
  for (const float limit : {0.0f, -1.0f, INFINITY, NAN}) {
    const auto change = [limit](auto& args) {
      args.activation = AB_SWIGLU_CLAMPED;
      args.activation_limit = limit;
    };
    refused(change, "expected a finite number above 0");
  }
  const auto without_alpha = [](auto& args) {
    args.activation = AB_SWIGLU_OAI;
    args.activation_limit = 7.0f;
  };
  refused(without_alpha, "activation_alpha: got 0, expected a finite number above 0");
  refused([](auto& args) { args.precision = 3; }, "precision: got 3, expected 0 to 2, an ab_precision");
  refused([](auto& args) { args.precision = -1; }, "precision: got -1, expected 0 to 2, an ab_precision");
  refused([](auto& args) { args.topk = 0; }, "topk: got 0, expected at least 1");
  refused([](auto& args) { args.slot_of_row = nullptr; }, "topk: got 2, expected 0 without slot_of_row");
  refused([](auto& args) { args.x = nullptr; }, "x: got NULL, expected");
  refused([](auto& args) { args.group_sizes = nullptr; }, "group_sizes: got NULL, expected int32 [E]");
  refused([&](auto& args) { args.w_in = bf16.view(); }, "w_in: got bfloat16 (7) [2, 3, 2, 4], expected float32");
  refused([&](auto& args) { args.w_in = three_parts.view(); }, "w_in: got 3 parts, expected 2 (gate, up) or 1");
  refused([&](auto& args) { args.w_out = odd.view(); },
          "w_out: got float32 (8) [1, 1], expected float32 [E=2, F=4, D=3]");
  refused([&](auto& args) { args.b_out = odd.view(); }, "b_out: got float32 (8) [1, 1], expected float32 [E=2, D=3]");
  refused([&](auto& args) { args.weights = odd.view(); }, "weights: got float32 (8) [1, 1], expected");
  refused([&](auto& args) { args.h = odd.view(); }, "h: got float32 (8) [1, 1], expected float32 [R=4, P=2, F=4]");

  ab_expert_ffn_forward_args forward = net.forward_args();
  forward.weights = nullptr;
  forward.weight_early = 1;
  EXPECT_REFUSED(ab_expert_ffn_forward(&forward, nullptr), AB_INVALID_ARGUMENT,
                 "weight_early: got 1, expected 0, or 1 together with weights");
  forward = net.forward_args();
  EXPECT_REFUSED(ab_expert_ffn_forward(&forward, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
  forward.y = odd.view();
  EXPECT_REFUSED(ab_expert_ffn_forward(&forward, nullptr), AB_INVALID_ARGUMENT, "y: got float32 (8) [1, 1], expected");
  ab_expert_ffn_backward_args backward = net.backward_args();
  backward.d_out = odd.view();
  EXPECT_REFUSED(ab_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT, "d_out: got float32 (8) [1, 1]");
  for (const auto member :
       {&ab_expert_ffn_backward_args::dh, &ab_expert_ffn_backward_args::dx_rows, &ab_expert_ffn_backward_args::d_w_in,
        &ab_expert_ffn_backward_args::d_b_in, &ab_expert_ffn_backward_args::d_w_out,
        &ab_expert_ffn_backward_args::d_b_out, &ab_expert_ffn_backward_args::d_weights}) {
    backward = net.backward_args();
    backward.*member = odd.view();
    EXPECT_REFUSED(ab_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT, ": got float32 (8) [1, 1]");
  }
  backward = net.backward_args();
  backward.accumulate = 2;
  EXPECT_REFUSED(ab_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT, "accumulate: got 2, expected 0 or 1");
  backward.accumulate = 1;
  const Tensor<uint16_t> narrow({2, 4, 3});
  backward.d_w_out = narrow.view();
  EXPECT_REFUSED(ab_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT,
                 "d_w_out: got bfloat16 (7) [2, 4, 3], expected float32 [E=2, F=4, D=3]");
  backward.d_w_in = backward.d_w_out = nullptr;
  EXPECT_REFUSED(ab_expert_ffn_backward(&backward, nullptr), AB_INVALID_ARGUMENT,
                 "accumulate: got 1, expected 0, or 1 together with d_w_in, d_w_out or the gradient of a factor");
  EXPECT_REFUSED(ab_expert_ffn_forward(nullptr, nullptr), AB_INVALID_ARGUMENT, "got NULL");
  EXPECT_REFUSED(ab_expert_ffn_backward(nullptr, nullptr), AB_INVALID_ARGUMENT, "got NULL");
}

TEST(ExpertFfn, WithoutYRejectsArgumentsOfTheSecondGemm) {
  const Network<float> net(2, 2, 3, 2, 4, {3, 1}, slots_in_order(4));
  const Floats a({4, 4});
  const auto refused = [&](auto change, const char* text) {
    ab_expert_ffn_forward_args args = net.forward_args();
    args.a = a.view();
    args.y = args.w_out = args.b_out = args.weights = nullptr;
    EXPECT_OK(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, args));
    change(args);
    EXPECT_REFUSED(call(ab_expert_ffn_forward, ab_expert_ffn_forward_workspace, args), AB_INVALID_ARGUMENT, text);
  };
  refused([&](auto& args) { args.w_out = net.w_out.view(); }, "w_out: got a tensor, expected NULL without y");
  refused([&](auto& args) { args.b_out = net.b_out.view(); }, "b_out: got a tensor, expected NULL without y");
  refused([&](auto& args) { args.weights = net.weights.view(); },
          "weights: got a tensor, expected NULL without y and weight_early");
  refused([&](auto& args) { args.a = net.x.view(); }, "a: got float32 (8) [2, 3], expected float32 [R=4, F=4]");
  refused([&](auto& args) { args.a = nullptr; }, "w_out: got NULL, expected");
}

}  // namespace
}  // namespace anabranch::testing
