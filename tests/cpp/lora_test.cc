// Adapters of the expert MLP against a float64 reference that adds them to the weights.
#include <algorithm>
#include <deque>

#include "lora_network.h"

namespace anabranch::testing {
namespace {

const Order kInterleaved = {0, 2, 1};

void expect_reference(LoraNetwork& net, const std::vector<std::string>& without = {}) {
  for (const auto& [name, want] : net.reference()) {
    if (std::ranges::find(without, name) != without.end() || net.inputs.contains(name)) continue;
    expect_near(net[name], want, bound_of(net.c.dtype), name);
  }
}

void check_case(const LoraCase& c) {
  LoraNetwork net(c);
  net.compute();
  expect_reference(net);
}

TEST(Lora, MatchesTheReference) {
  LoraCase c;
  check_case(c);
  c.by_slot = false;
  c.early = 1;
  c.P = 1;
  c.rank_in = 11;  // above D and F
  c.rank_out = 1;
  check_case(c);
  LoraCase tall;  // several tiles of rows
  tall.T = 200;
  tall.R = 420;
  tall.sizes = {300, 0, 1, 99};
  tall.rank_in = 20;  // above D and P F
  check_case(tall);
  LoraCase wide;  // several tiles of columns
  wide.F = 520;
  check_case(wide);
}

TEST(Lora, Bf16MatchesTheReference) {
  check_case(in_dtype(AB_BFLOAT16, AB_BFLOAT16));
  LoraCase c = in_dtype(AB_BFLOAT16, AB_FLOAT32);
  c.early = 1;
  c.rank_in = 1;
  c.D = 40;
  c.rank_out = 1030;  // several blocks of terms
  check_case(c);
}

TEST(Lora, Float16MatchesTheReference) {
  check_case(in_dtype(AB_FLOAT16, AB_FLOAT16));
  check_case(in_dtype(AB_FLOAT16, AB_FLOAT32));
}

TEST(Lora, GroupSizesAreClippedToTheRows) {
  LoraCase c;
  for (const std::vector<int32_t>& sizes :
       {std::vector<int32_t>{-3, INT32_MAX, INT32_MAX}, {INT32_MIN, 2, -1}, {5, INT32_MAX, 7}}) {
    c.sizes = sizes;
    c.shares_a = !c.shares_a;
    check_case(c);
  }
}

TEST(Lora, AcceptsEmptySizes) {
  const auto check = [](auto change) {
    for (const bool shared : {false, true}) {
      LoraCase c = in_dtype(AB_BFLOAT16, AB_FLOAT32);
      c.shares_a = c.shares_b = shared;
      c.w_in = {0, 3, 2, 1};
      c.intermediate = kInterleaved;
      change(c);
      check_case(c);
    }
  };
  check([](LoraCase& c) { c.R = 0; });
  check([](LoraCase& c) { c.sizes = {}; });
  check([](LoraCase& c) { c.sizes = {0, 0, 0}; });
  check([](LoraCase& c) { c.D = 0; });
  check([](LoraCase& c) { c.F = 0; });
}

// Memory orders of weights and factors.
TEST(Lora, AcceptsEveryLayout) {
  struct Layout {
    Order w_in, w_out, intermediate, a, b_in, b_out;
  };
  const Layout layouts[] = {
      {{0, 2, 3, 1}, {0, 2, 1}, {}, {}, {}, {0, 2, 1}},
      {{0, 1, 3, 2}, {}, kInterleaved, {0, 2, 1}, {}, {}},
      {{0, 3, 2, 1}, {0, 2, 1}, kInterleaved, {1, 0, 2}, {0, 1, 3, 2}, {2, 1, 0}},
      {{}, {}, {}, {2, 0, 1}, {3, 2, 1, 0}, {1, 2, 0}},
  };
  for (const Layout& layout : layouts) {
    for (LoraCase c : {in_dtype(AB_FLOAT32, AB_FLOAT32), in_dtype(AB_BFLOAT16, AB_BFLOAT16)}) {
      c.w_in = layout.w_in;
      c.w_out = layout.w_out;
      c.intermediate = layout.intermediate;
      c.a = layout.a;
      c.b_in = layout.b_in;
      c.b_out = layout.b_out;
      check_case(c);
    }
  }
}

// An expanded view: all experts read the same memory, but each has its own gradient.
TEST(Lora, AcceptsAFactorWithAStrideOfZero) {
  LoraCase c;
  c.shares_a = c.shares_b = true;
  LoraNetwork shared(c);
  shared.compute();
  ab_expert_ffn_forward_args args = shared.forward_args();
  ab_tensor expanded = *args.lora_a_in;
  const int64_t strides[] = {0, c.rank_in, 1};
  expanded.shape[0] = shared.E;
  expanded.strides = strides;
  args.lora_a_in = &expanded;
  const OrderedTensor y({c.R, c.D}, c.dtype);
  args.y = y.view();
  EXPECT_OK(LoraNetwork::run(args));
  EXPECT_TRUE(y.memory().is(shared["y"].memory()));
}

TEST(Lora, ExpertsMayShareFactors) {
  for (LoraCase c : {in_dtype(AB_FLOAT32, AB_FLOAT32), in_dtype(AB_BFLOAT16, AB_BFLOAT16)}) {
    for (const bool shares_a : {false, true}) {
      c.shares_a = shares_a;
      c.shares_b = true;
      check_case(c);
      c.shares_b = !shares_a;
      c.w_in = {0, 1, 3, 2};
      c.intermediate = kInterleaved;
      check_case(c);
    }
  }
}

TEST(Lora, ZeroBHasTheBitsWithoutAdapters) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    LoraCase c = in_dtype(dtype, dtype);
    c.T = 60;
    c.R = 130;
    c.sizes = {90, 0, 39};
    c.F = 300;
    for (const bool in : {false, true}) {
      for (const bool out : {false, true}) {
        LoraNetwork want(c), got(c);
        ab_expert_ffn_forward_args forward = want.forward_args();
        ab_expert_ffn_backward_args backward = want.backward_args();
        std::vector<std::string> absent;
        if (in) {
          for (LoraNetwork* net : {&want, &got}) (*net)["lora_b_in"].fill(0);
          remove_in(&forward);
          remove_in(&backward);
          absent = {"lora_u", "lora_v_in", "d_lora_a_in", "d_lora_b_in"};
        }
        if (out) {
          for (LoraNetwork* net : {&want, &got}) (*net)["lora_b_out"].fill(0);
          remove_out(&forward);
          remove_out(&backward);
          absent.insert(absent.end(), {"lora_z", "lora_v_out", "d_lora_a_out", "d_lora_b_out"});
        }
        EXPECT_OK(LoraNetwork::run(forward));
        EXPECT_OK(LoraNetwork::run(backward));
        got.compute();
        expect_same(got, want, std::string(in ? "in" : "") + (out ? "out" : ""), absent);
      }
    }
  }
}

TEST(Lora, HasTheSameBitsForEveryThreadCount) {
  for (LoraCase c : {in_dtype(AB_FLOAT32, AB_FLOAT32), in_dtype(AB_BFLOAT16, AB_FLOAT32)}) {
    c.T = 200;
    c.R = 420;
    c.sizes = {300, 0, 1, 99};
    c.D = 72;
    c.F = 140;
    c.rank_in = 9;
    c.w_in = {0, 3, 2, 1};
    c.intermediate = kInterleaved;
    c.shares_a = true;
    LoraNetwork one(c);
    one.compute(1);
    for (const int threads : {2, 3, 8}) {
      LoraNetwork many(c);
      many.compute(threads);
      expect_same(many, one, std::to_string(threads) + " threads");
    }
  }
}

TEST(Lora, DhMayAliasH) {
  LoraNetwork separate{LoraCase{}}, aliased{LoraCase{}};
  separate.compute();
  EXPECT_OK(LoraNetwork::run(aliased.forward_args()));
  ab_expert_ffn_backward_args args = aliased.backward_args();
  args.dh = args.h;
  EXPECT_OK(LoraNetwork::run(args));
  EXPECT_TRUE(aliased["h"].memory().is(separate["dh"].memory()));
  expect_same(aliased, separate, "aliased", {"h", "dh"});
}

TEST(Lora, SkipRestChangesNoRowOfAGroup) {
  LoraNetwork want{LoraCase{}}, net{LoraCase{}};
  want.compute();
  ab_expert_ffn_forward_args forward = net.forward_args();
  ab_expert_ffn_backward_args backward = net.backward_args();
  forward.skip_rest = backward.skip_rest = 1;
  EXPECT_OK(LoraNetwork::run(forward));
  EXPECT_OK(LoraNetwork::run(backward));
  const std::vector<std::string> skipped = {"h", "a", "dh", "weighted_a"};
  expect_same(net, want, "skip_rest", skipped);
  for (const std::string& name : skipped) {
    const int64_t columns = net[name].size() / net.c.R;
    for (int64_t i = 0; i < 22 * columns; ++i) ASSERT_EQ(net[name][i], want[name][i]) << name;
  }
}

// keeps_v: the second call reads v_in and v_out of the first. keeps_u: backward reads u of the forward pass.
void check_two_calls(const LoraCase& c, bool w_out_comes_first, bool keeps_v, bool keeps_u) {
  LoraNetwork one(c), two(c);
  one.compute();
  EXPECT_OK(LoraNetwork::run(two.forward_args()));
  ab_expert_ffn_backward_args all = two.backward_args();
  if (!keeps_u) all.lora_u = nullptr;
  if (!keeps_v) all.lora_v_in = all.lora_v_out = nullptr;
  const auto [first, second] = in_two_calls(all, all.weighted_a, w_out_comes_first);
  EXPECT_OK(LoraNetwork::run(first));
  EXPECT_OK(LoraNetwork::run(second));
  expect_same(two, one, "two calls",
              keeps_v ? std::vector<std::string>{} : std::vector<std::string>{"lora_v_in", "lora_v_out"});
}

TEST(Lora, TwoCallsMatchOne) {
  for (LoraCase c : {in_dtype(AB_FLOAT32, AB_FLOAT32), in_dtype(AB_BFLOAT16, AB_FLOAT32)}) {
    c.w_in = {0, 1, 3, 2};
    c.intermediate = kInterleaved;
    for (const bool w_out_comes_first : {false, true}) {
      check_two_calls(c, w_out_comes_first, true, true);
      check_two_calls(c, w_out_comes_first, false, false);
    }
  }
}

TEST(Lora, EachOutputIsTheSameAlone) {
  using A = ab_expert_ffn_backward_args;
  LoraNetwork all{LoraCase{}}, one{LoraCase{}};
  all.compute();
  EXPECT_OK(LoraNetwork::run(one.forward_args()));
  for (const auto output :
       {&A::dh, &A::dx_rows, &A::d_w_in, &A::d_b_in, &A::d_w_out, &A::d_b_out, &A::d_weights, &A::weighted_a,
        &A::lora_v_in, &A::lora_v_out, &A::d_lora_a_in, &A::d_lora_b_in, &A::d_lora_a_out, &A::d_lora_b_out}) {
    const A given = one.backward_args();
    A args = given;
    args.dh = args.dx_rows = args.d_w_in = args.d_b_in = args.d_w_out = args.d_b_out = args.d_weights = nullptr;
    args.weighted_a = args.lora_v_in = args.lora_v_out = nullptr;
    args.d_lora_a_in = args.d_lora_b_in = args.d_lora_a_out = args.d_lora_b_out = nullptr;
    args.lora_u = nullptr;
    args.*output = given.*output;
    EXPECT_OK(LoraNetwork::run(args));
  }
  expect_same(one, all, "alone");
}

// Copies hold the rounded factors, and the backward pass computes the same bits from them.
TEST(Lora, CopiesOfFactors) {
  LoraCase c = in_dtype(AB_BFLOAT16, AB_FLOAT32);
  c.shares_b = true;
  LoraNetwork want(c);
  want.compute();
  const Order of_three[] = {{0, 1, 2}, {0, 2, 1}, {0, 1, 2}, {0, 2, 1}};
  const Order of_four[] = {{0, 1, 2, 3}, {0, 2, 3, 1}, {0, 1, 3, 2}, {0, 3, 2, 1}};
  for (int order = 0; order < 4; ++order) {
    LoraNetwork net(c);
    ab_expert_ffn_forward_args forward = net.forward_args();
    ab_expert_ffn_backward_args backward = net.backward_args();
    std::vector<std::unique_ptr<OrderedTensor>> copies;
    const auto copy = [&](const ab_tensor** factor, const ab_tensor** output) {
      const ab_tensor& of = **factor;
      const Order& axes = of.rank == 4 ? of_four[order] : of_three[order];
      copies.push_back(std::make_unique<OrderedTensor>(std::vector<int64_t>(of.shape, of.shape + of.rank),
                                                       int32_t{AB_BFLOAT16}, axes));
      copies.back()->fill(-7);
      *factor = *output = copies.back()->view();
    };
    copy(&backward.lora_a_in, &forward.lora_a_in_copy);
    copy(&backward.lora_b_in, &forward.lora_b_in_copy);
    copy(&backward.lora_a_out, &forward.lora_a_out_copy);
    copy(&backward.lora_b_out, &forward.lora_b_out_copy);
    EXPECT_OK(LoraNetwork::run(forward, 3));
    EXPECT_OK(LoraNetwork::run(backward));
    expect_same(net, want, "order " + std::to_string(order));
    const char* names[] = {"lora_a_in", "lora_b_in", "lora_a_out", "lora_b_out"};
    for (size_t i = 0; i < 4; ++i) {
      const OrderedTensor& factor = net[names[i]];
      const int64_t each = factor.size() / factor.view()->shape[0];
      for (int64_t k = 0; k < factor.size(); ++k) {
        FloatTensor rounded({1}, AB_BFLOAT16);
        rounded.set(0, static_cast<float>(factor[k]));
        const bool has_rows = factor.view()->shape[0] == 1 || c.sizes[static_cast<size_t>(k / each)] > 0;
        ASSERT_EQ((*copies[i])[k], has_rows ? static_cast<double>(rounded.get(0)) : -7.0) << names[i] << " " << k;
      }
    }
  }
}

// A backward call without h ignores the contents of padding rows of dh and weighted_a.
TEST(Lora, PaddingRowsOfTheSecondCallAreIgnored) {
  LoraNetwork one{LoraCase{}}, two{LoraCase{}};
  one.compute();
  EXPECT_OK(LoraNetwork::run(two.forward_args()));
  ab_expert_ffn_backward_args all = two.backward_args();
  all.lora_v_in = all.lora_v_out = nullptr;
  const auto [first, second] = in_two_calls(all, all.weighted_a, false);
  EXPECT_OK(LoraNetwork::run(first));
  std::vector<bool> is_padding(static_cast<size_t>(two.c.R), true);
  for (int64_t e = 0; e < two.E; ++e) {
    for (const int64_t r : two.rows_of(e)) is_padding[static_cast<size_t>(r)] = false;
  }
  for (const char* name : {"dh", "weighted_a"}) {
    const int64_t columns = two[name].size() / two.c.R;
    for (int64_t i = 0; i < two[name].size(); ++i) {
      if (is_padding[static_cast<size_t>(i / columns)]) two[name].set(i, 3);
    }
  }
  EXPECT_OK(LoraNetwork::run(second));
  expect_same(two, one, "second call", {"dh", "weighted_a", "lora_v_in", "lora_v_out"});
}

TEST(Lora, NanInAFactorStaysOutOfPaddingAndOtherExperts) {
  for (const char* factor : {"lora_a_in", "lora_b_in", "lora_a_out", "lora_b_out"}) {
    LoraNetwork net{LoraCase{}};
    net[factor].set(0, NAN);  // of expert 0
    net.compute();
    const std::vector<int64_t> rows = net.rows_of(0);
    for (const char* name : {"y", "dx_rows"}) {
      bool has_nan = false;
      for (int64_t i = 0; i < net[name].size(); ++i) {
        const bool is_nan = std::isnan(net[name][i]);
        has_nan |= is_nan;
        EXPECT_TRUE(!is_nan || std::ranges::count(rows, i / net.c.D) == 1) << factor << ": " << name << " " << i;
      }
      EXPECT_TRUE(has_nan) << factor << ": " << name;
    }
    for (const char* name : {"d_lora_a_in", "d_lora_b_in", "d_lora_a_out", "d_lora_b_out"}) {
      const int64_t size = net[name].size();
      for (int64_t i = size / net.E; i < size; ++i) EXPECT_FALSE(std::isnan(net[name][i])) << factor << ": " << name;
    }
  }
}

// Gradients of factors have the dtype of the factors or are float32; accumulate then adds to them.
TEST(Lora, GradientsAccumulate) {
  for (LoraCase c : {in_dtype(AB_FLOAT32, AB_FLOAT32), in_dtype(AB_BFLOAT16, AB_BFLOAT16)}) {
    for (const bool interleaved : {false, true}) {
      c.shares_a = interleaved;
      c.w_in = interleaved ? Order{0, 1, 3, 2} : Order{};
      c.intermediate = interleaved ? kInterleaved : Order{};
      LoraNetwork net(c);
      EXPECT_OK(LoraNetwork::run(net.forward_args()));
      std::deque<Floats> gradients, before, sums;
      ab_expert_ffn_backward_args args = net.backward_args(), adding = args;
      adding.accumulate = 1;
      using A = ab_expert_ffn_backward_args;
      for (const auto field : {&A::d_lora_a_in, &A::d_lora_b_in, &A::d_lora_a_out, &A::d_lora_b_out, &A::d_w_in}) {
        const ab_tensor& view = *(args.*field);
        const std::vector<int64_t> shape(view.shape, view.shape + view.rank);
        gradients.emplace_back(shape);
        for (std::deque<Floats>* values : {&before, &sums}) {
          values->emplace_back(shape, noise(gradients.back().size(), static_cast<uint32_t>(gradients.size())));
        }
        gradients.back().mutable_view()->strides = sums.back().mutable_view()->strides = view.strides;
        args.*field = gradients.back().view();
        adding.*field = sums.back().view();
      }
      EXPECT_OK(LoraNetwork::run(args));
      EXPECT_OK(LoraNetwork::run(adding));
      for (size_t i = 0; i < sums.size(); ++i) expect_accumulated(sums[i], before[i], gradients[i]);
    }
  }
}

// x, d_out, W_in and W_out are represented exactly. `a` and dh are not, but y and dx do not depend on them if the
// weights are zero.
TEST(Lora, Fp8QuantisesNoFactor) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16}) {
    LoraCase c = in_fp8(dtype);
    LoraNetwork net(c);
    net.compute();
    expect_reference(net, {"y", "dx_rows"});
    c.has_zero_weights = true;
    c.early = 1;
    check_case(c);
  }
  LoraCase c = in_fp8(AB_FLOAT32);
  c.w_in = {0, 1, 3, 2};
  c.intermediate = kInterleaved;
  LoraNetwork interleaved(c);
  interleaved.compute();
  expect_reference(interleaved, {"y", "dx_rows"});
}

TEST(Lora, RefusesBadArguments) {
  LoraNetwork net(in_dtype(AB_BFLOAT16, AB_FLOAT32));
  const ab_expert_ffn_forward_args forward = net.forward_args();
  const ab_expert_ffn_backward_args backward = net.backward_args();
  const auto refused = [](auto args, auto change, const char* text) {
    change(args);
    EXPECT_REFUSED(LoraNetwork::run(args), AB_INVALID_ARGUMENT, text);
  };
  const auto both_refused = [&](auto change, const char* text) {
    refused(forward, change, text);
    refused(backward, change, text);
  };
  both_refused([](auto& args) { args.lora_b_in = nullptr; }, "lora_b_in: got NULL, expected bfloat16 or float32");
  both_refused([](auto& args) { args.lora_a_out = nullptr; }, "lora_a_out: got NULL, expected bfloat16 or float32");
  for (const float scale : {INFINITY, -INFINITY, NAN}) {
    both_refused([&](auto& args) { args.lora_scale_in = scale; }, ", expected a finite number");
    both_refused([&](auto& args) { args.lora_scale_out = scale; }, ", expected a finite number");
  }
  const OrderedTensor half({4, 7, 2}, AB_FLOAT16), two({2, 7, 2}, AB_FLOAT32), wide({4, 8, 2}, AB_FLOAT32),
      none({4, 7, 0}, AB_FLOAT32), other_rank({4, 3, 2, 6}, AB_FLOAT32), flat({4, 2, 12}, AB_FLOAT32);
  const Ints integers({4, 7, 2});
  both_refused([&](auto& args) { args.lora_a_in = half.view(); },
               "lora_a_in: got float16 (6) [4, 7, 2], expected bfloat16 or float32 [E or 1, D=7, r]");
  both_refused([&](auto& args) { args.lora_a_in = integers.view(); }, "lora_a_in: got int32 (4) [4, 7, 2], expected");
  both_refused([&](auto& args) { args.lora_a_in = two.view(); },
               "lora_a_in: got 2 matrices, expected E=4, or 1 that all experts share");
  both_refused([&](auto& args) { args.lora_a_in = wide.view(); }, "lora_a_in: got float32 (8) [4, 8, 2], expected");
  both_refused([&](auto& args) { args.lora_a_in = none.view(); }, "lora_a_in: got rank 0, expected at least 1");
  both_refused([&](auto& args) { args.lora_b_in = other_rank.view(); },
               "lora_b_in: got float32 (8) [4, 3, 2, 6], expected bfloat16 or float32 [E or 1, r=2, P=2, F=6]");
  both_refused([&](auto& args) { args.lora_b_in = flat.view(); }, "lora_b_in: got float32 (8) [4, 2, 12], expected");
  ab_tensor far = *net.view("lora_b_out");
  int64_t strides[] = {INT64_MAX, 1, 1};
  far.strides = strides;
  both_refused([&](auto& args) { args.lora_b_out = &far; },
               "lora_b_out: got stride 9223372036854775807 along axis 0, expected elements at most 2^56 apart");
  strides[0] = (int64_t{1} << 56) / 3;
  strides[1] = -(int64_t{1} << 55) - 1;
  both_refused([&](auto& args) { args.lora_b_out = &far; }, "lora_b_out: got stride -36028797018963969 along axis 1");
  far.data = nullptr;
  strides[1] = 1;
  both_refused([&](auto& args) { args.lora_b_out = &far; }, "lora_b_out: got data NULL, expected memory for [4, 3, 7]");

  both_refused([&](auto& args) { args.lora_u = net.view("dx_rows"); },
               "lora_u: got bfloat16 (7) [28, 7], expected bfloat16 [R=28, r=2]");
  const auto without_in = [](auto change) {
    return [change](auto& args) {
      remove_in(&args);
      change(args);
    };
  };
  both_refused(without_in([&](auto& args) { args.lora_u = net.view("lora_u"); }),
               "lora_u: got a tensor, expected NULL without an adapter");
  both_refused(without_in([](auto& args) { args.lora_scale_in = 1.0f; }),
               "lora_scale_in: got 1, expected 0 without an adapter that it scales");
  const auto forward_refused = [&](auto change, const char* text) { refused(forward, change, text); };
  forward_refused([&](auto& args) { args.lora_z = net.view("lora_u"); }, "lora_z: got bfloat16 (7) [28, 2], expected");
  forward_refused([](auto& args) { args.y = args.w_out = args.b_out = args.weights = args.lora_z = nullptr; },
                  "lora_z: got NULL, expected a tensor, since the adapter of W_out is given and y is not");

  forward_refused([&](auto& args) { args.lora_a_in_copy = net.view("lora_a_in"); },
                  "lora_a_in_copy: got float32 (8) [4, 7, 2], expected bfloat16 [E=4, D=7, r=2]");
  forward_refused([&](auto& args) { args.lora_b_in_copy = net.view("dx_rows"); },
                  "lora_b_in_copy: got bfloat16 (7) [28, 7], expected bfloat16 [E=4, r=2, P=2, F=6]");
  forward_refused(without_in([&](auto& args) { args.lora_a_in_copy = net.view("dx_rows"); }),
                  "lora_a_in_copy: got a tensor, expected NULL without an adapter");
  const OrderedTensor innermost({4, 3, 7}, AB_BFLOAT16, {2, 1, 0});
  forward_refused([&](auto& args) { args.lora_b_out_copy = innermost.view(); },
                  "lora_b_out_copy: got unsupported strides, expected [4, 3, 7] with the memory order");

  using A = ab_expert_ffn_backward_args;
  const auto backward_refused = [&](auto change, const char* text) { refused(backward, change, text); };
  for (const auto gradient : {&A::d_lora_a_in, &A::d_lora_b_in}) {
    backward_refused(without_in([&](A& args) { args.*gradient = backward.*gradient; }),
                     "_in: got a tensor, expected NULL without an adapter");
  }
  backward_refused(without_in([&](A& args) { args.lora_v_in = backward.lora_v_in; }),
                   "lora_v_in: got a tensor, expected NULL without an adapter");
  backward_refused([&](A& args) { args.lora_v_out = net.view("lora_u"); }, "lora_v_out: got bfloat16 (7) [28, 2], exp");
  backward_refused([&](A& args) { args.d_lora_a_in = half.view(); },
                   "d_lora_a_in: got float16 (6) [4, 7, 2], expected float32 [E=4, D=7, r=2]");
  backward_refused([&](A& args) { args.d_lora_b_in = flat.view(); },
                   "d_lora_b_in: got float32 (8) [4, 2, 12], expected float32 [E=4, r=2, P=2, F=6]");
  backward_refused([&](A& args) { args.d_lora_a_out = two.view(); }, "d_lora_a_out: got float32 (8) [2, 7, 2], exp");
  backward_refused([&](A& args) { args.d_lora_b_out = two.view(); }, "d_lora_b_out: got float32 (8) [2, 7, 2], exp");
  ab_tensor strided = *backward.d_lora_b_out;
  strides[0] = 0;
  strided.strides = strides;
  backward_refused([&](A& args) { args.d_lora_b_out = &strided; },
                   "d_lora_b_out: got strides that are not contiguous, expected row-major [4, 3, 7]");
  LoraNetwork narrow(in_dtype(AB_BFLOAT16, AB_BFLOAT16));
  refused(
      narrow.backward_args(), [](A& args) { args.accumulate = 1; },
      "d_lora_a_in: got bfloat16 (7) [4, 7, 2], expected float32 [E=4, D=7, r=2]");

  // A later call.
  A later = backward;
  later.h = later.d_weights = nullptr;
  EXPECT_OK(LoraNetwork::run(later));
  const auto later_refused = [&](auto change, const char* text) { refused(later, change, text); };
  later_refused([](A& args) { args.weighted_a = args.d_w_out = nullptr; },
                "h: got NULL, expected [R, P, F], or weighted_a from an earlier call");
  later_refused(
      [](A& args) { args.dh = args.lora_v_in = args.dx_rows = args.d_w_in = args.d_b_in = args.d_lora_b_in = nullptr; },
      "h: got NULL, expected [R, P, F], or dh from an earlier call");
  later_refused([](A& args) { args.d_lora_a_out = nullptr; },
                "lora_v_out: got a tensor, expected NULL without h and d_lora_a_out");
  later_refused([](A& args) { args.dx_rows = args.d_lora_a_in = nullptr; },
                "lora_v_in: got a tensor, expected NULL without h, dx_rows and d_lora_a_in");
  later_refused(
      [](A& args) { args.d_out = args.d_w_out = args.d_b_out = args.d_lora_a_out = args.lora_v_out = nullptr; },
      "d_out: got NULL, expected");
}

}  // namespace
}  // namespace anabranch::testing
