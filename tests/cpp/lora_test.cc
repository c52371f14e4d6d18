// Adapters of the expert MLP against a float64 reference that adds them to the weights.
#include <algorithm>
#include <array>
#include <deque>

#include "anabranch/dispatch.h"
#include "grouped_matmul_args.h"
#include "lora_network.h"

namespace anabranch::testing {
namespace {

const Order kInterleaved = {0, 2, 1};

LoraCase in_dtype(int32_t dtype, int32_t factor_dtype) {
  LoraCase c;
  c.dtype = dtype;
  c.factor_dtype = factor_dtype;
  return c;
}

// Roundings of u, h, a and the factors add up.
double bound_of(int32_t dtype) { return dtype == AB_FLOAT32 ? 2e-6 : 6 * rounding_of(dtype); }

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

void expect_same(LoraNetwork& got, LoraNetwork& want, const std::string& what,
                 const std::vector<std::string>& without = {}) {
  for (const auto& [name, tensor] : got.tensors) {
    if (std::ranges::find(without, name) != without.end()) continue;
    EXPECT_TRUE(tensor.memory().is(want[name].memory())) << what << ": " << name;
  }
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
  LoraCase large;
  large.T = 200;
  large.R = 420;
  large.sizes = {300, 0, 1, 99};
  large.D = 33;
  large.F = 300;  // columns in several tiles
  large.rank_in = 70;
  large.rank_out = 600;  // several blocks of terms
  check_case(large);
}

TEST(Lora, Bf16MatchesTheReference) {
  check_case(in_dtype(AB_BFLOAT16, AB_BFLOAT16));
  LoraCase c = in_dtype(AB_BFLOAT16, AB_FLOAT32);
  c.early = 1;
  c.rank_in = 1;
  c.D = 40;
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

// Sums the rows of a network per token: combine after the network, and grouped_matmul_combine in its place.
struct Combined {
  LoraNetwork& net;
  Ints row_of_slot;
  OrderedTensor want, got;

  explicit Combined(LoraNetwork& network)
      : net(network),
        row_of_slot({net.c.T, net.c.K}),
        want({net.c.T, net.c.D}, net.c.dtype),
        got({net.c.T, net.c.D}, net.c.dtype) {
    for (int64_t r = 0; r < net.c.R; ++r) {
      const int32_t slot = net.slot_of_row[r];
      if (slot >= 0 && slot < net.c.T * net.c.K) row_of_slot[slot] = static_cast<int32_t>(r);
    }
  }
  ab_grouped_matmul_combine_args args(const ab_tensor* x, const ab_tensor* w) const {
    ab_grouped_matmul_combine_args args{};
    args.size = sizeof(args);
    args.x = x;
    args.w = w;
    args.group_sizes = net.group_sizes.view();
    args.slot_of_row = net.slot_of_row.view();
    args.row_of_slot = row_of_slot.view();
    args.out = got.view();
    args.precision = net.c.precision;
    args.fp8_scales = net.c.precision == AB_PRECISION_FP8 ? AB_FP8_SCALES_POWER_OF_TWO : 0;
    return args;
  }
  void expect_same(const char* rows, const ab_grouped_matmul_combine_args& args, const std::string& what) {
    const ab_tensor* weights = args.weight_early != 0 ? nullptr : args.weights;
    const ab_combine_args sum{sizeof(sum), net.view(rows), args.row_of_slot, weights, want.view(), nullptr};
    EXPECT_OK(call(ab_combine, ab_combine_workspace, sum));
    got.fill(NAN);
    EXPECT_OK(call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args));
    EXPECT_TRUE(got.memory().is(want.memory())) << what;
  }
};

// A factor [E or 1, M, N] as [E or 1, N, M].
struct Transposed {
  ab_tensor view;
  int64_t strides[3];

  explicit Transposed(const ab_tensor& from) : view(from), strides{} {
    std::swap(view.shape[1], view.shape[2]);
    for (int axis = 0; axis < 3; ++axis) strides[axis] = from.strides != nullptr ? from.strides[axis] : 0;
    if (from.strides == nullptr)
      std::copy_n(std::array{from.shape[1] * from.shape[2], from.shape[2], int64_t{1}}.begin(), 3, strides);
    std::swap(strides[1], strides[2]);
    view.strides = strides;
  }
  Transposed(const Transposed&) = delete;
  Transposed& operator=(const Transposed&) = delete;
};

// Merges the last two axes of a row-major tensor.
ab_tensor merged(const ab_tensor* from) {
  ab_tensor view = *from;
  view.shape[--view.rank - 1] *= from->shape[from->rank - 1];
  return view;
}

TEST(Lora, CombineMatchesTheNetworkAndASum) {
  for (LoraCase c :
       {in_dtype(AB_FLOAT32, AB_FLOAT32), in_dtype(AB_BFLOAT16, AB_BFLOAT16), in_dtype(AB_BFLOAT16, AB_FLOAT32)}) {
    c.D = 33;
    c.F = 24;
    c.rank_in = 17;
    for (const int32_t early : {0, 1}) {
      c.early = early;
      c.shares_b = early != 0;
      LoraNetwork net(c);
      ab_expert_ffn_forward_args forward = net.forward_args();
      if (early == 0) forward.weights = nullptr;
      EXPECT_OK(LoraNetwork::run(forward));
      EXPECT_OK(LoraNetwork::run(net.backward_args()));
      Combined combined(net);
      ab_grouped_matmul_combine_args down = combined.args(net.view("a"), net.view("w_out"));
      down.weight_early = early;
      down.weights = net.view("weights");
      down.bias = net.view("b_out");
      down.lora_b = net.view("lora_b_out");
      down.lora_u = net.view("lora_z");
      combined.expect_same("y", down, "z given");
      const OrderedTensor z({c.R, c.rank_out}, c.dtype);
      down.lora_scale = LoraNetwork::kScaleOut;
      down.lora_a = net.view("lora_a_out");
      down.lora_u = z.view();
      combined.expect_same("y", down, "z computed");
      EXPECT_TRUE(z.memory().is(net["lora_z"].memory()));

      const ab_tensor dh = merged(net.view("dh"));
      const ab_tensor w_in = merged(net.view("w_in"));
      const Transposed a(*net.view("lora_a_in"));
      ab_grouped_matmul_combine_args dgrad = combined.args(&dh, &w_in);
      dgrad.transpose_w = 1;
      dgrad.lora_b = &a.view;
      dgrad.lora_u = net.view("lora_v_in");
      combined.expect_same("dx_rows", dgrad, "v_in given");
      const ab_tensor b_in = merged(net.view("lora_b_in"));
      const Transposed b(b_in);
      dgrad.lora_scale = LoraNetwork::kScaleIn;
      dgrad.lora_a = &b.view;
      dgrad.lora_u = nullptr;
      combined.expect_same("dx_rows", dgrad, "v_in computed");

      // The first half alone: a and z without y.
      LoraNetwork half(c);
      ab_expert_ffn_forward_args up = half.forward_args();
      up.y = up.w_out = up.b_out = nullptr;
      if (early == 0) up.weights = nullptr;
      EXPECT_OK(LoraNetwork::run(up));
      for (const char* name : {"h", "a", "lora_u", "lora_z"}) {
        EXPECT_TRUE(half[name].memory().is(net[name].memory())) << name;
      }
    }
  }
}

// The gradients of a grouped GEMM are grouped GEMMs with the transposed factors, and sums of outer products.
void check_grouped_matmul(int32_t dtype, int32_t factor_dtype, bool shared, bool transposed_w) {
  const int64_t R = 41, D = 19, N = 23, r = 5, experts = shared ? 1 : 4;
  const std::vector<int32_t> group_sizes = {17, 0, 1, 20};
  const Ints sizes({4}, group_sizes);
  OrderedTensor x({R, D}, dtype), w({4, D, N}, dtype, transposed_w ? Order{0, 2, 1} : Order{}), d_y({R, N}, dtype);
  OrderedTensor a({experts, D, r}, factor_dtype), b({experts, r, N}, factor_dtype, {2, 0, 1});
  uint32_t seed = 1;
  for (OrderedTensor* tensor : {&x, &w, &d_y, &a, &b}) {
    const std::vector<float> values = noise(tensor->size(), ++seed);
    for (int64_t i = 0; i < tensor->size(); ++i) tensor->set(i, values[static_cast<size_t>(i)]);
  }
  LoraReference product(w, a, b, 0.5);
  std::map<std::string, Doubles> want;
  const std::vector<int64_t> offsets = offsets_of(group_sizes, R);
  for (int64_t e = 0; e < 4; ++e) {
    const int64_t m = offsets[static_cast<size_t>(e) + 1] - offsets[static_cast<size_t>(e)];
    const auto rows = [&](const OrderedTensor& tensor) {
      const int64_t columns = tensor.size() / R;
      const Doubles values = tensor.values();
      return Doubles(values.begin() + offsets[static_cast<size_t>(e)] * columns,
                     values.begin() + offsets[static_cast<size_t>(e) + 1] * columns);
    };
    const auto append = [&](const char* name, const Doubles& values) {
      want[name].insert(want[name].end(), values.begin(), values.end());
    };
    append("y", product.y(e, rows(x), m));
    append("u", product.u(e, rows(x), m));
    append("d_x", product.d_x(e, rows(d_y), m));
    append("v", product.v(e, rows(d_y), m));
    product.add_gradients(e, rows(x), rows(d_y), m);
  }
  OrderedTensor y({R, N}, dtype), u({R, r}, dtype), d_x({R, D}, dtype), v({R, r}, dtype);
  OrderedTensor d_a({experts, D, r}, AB_FLOAT32), d_b({experts, r, N}, AB_FLOAT32);
  const auto expect = [&](const OrderedTensor& got, Doubles values, const char* name) {
    values.resize(static_cast<size_t>(got.size()));  // zeros past the groups
    expect_near(got, values, bound_of(dtype), name);
  };
  ab_tensor stored_w = *w.view();
  if (transposed_w) std::swap(stored_w.shape[1], stored_w.shape[2]);
  stored_w.strides = nullptr;
  ab_grouped_matmul_args args = grouped_matmul_args(x.view(), &stored_w, sizes.view(), y.view(), transposed_w ? 1 : 0);
  args.lora_scale = 0.5f;
  args.lora_a = a.view();
  args.lora_b = b.view();
  args.lora_u = u.view();
  EXPECT_OK(call(ab_grouped_matmul, ab_grouped_matmul_workspace, args));
  expect(y, want["y"], "y");
  expect(u, want["u"], "u");
  const OrderedTensor again({R, N}, dtype);
  args.y = again.view();
  args.lora_u = nullptr;
  EXPECT_OK(call(ab_grouped_matmul, ab_grouped_matmul_workspace, args));
  EXPECT_TRUE(again.memory().is(y.memory()));
  args.lora_scale = 0.0f;
  args.lora_a = nullptr;
  args.lora_u = u.view();
  EXPECT_OK(call(ab_grouped_matmul, ab_grouped_matmul_workspace, args));
  EXPECT_TRUE(again.memory().is(y.memory()));

  const Transposed b_t(*b.view()), a_t(*a.view());
  ab_grouped_matmul_args backward =
      grouped_matmul_args(d_y.view(), &stored_w, sizes.view(), d_x.view(), transposed_w ? 0 : 1);
  backward.lora_scale = 0.5f;
  backward.lora_a = &b_t.view;
  backward.lora_b = &a_t.view;
  backward.lora_u = v.view();
  EXPECT_OK(call(ab_grouped_matmul, ab_grouped_matmul_workspace, backward));
  expect(d_x, want["d_x"], "d_x");
  expect(v, want["v"], "v");
  const auto outer = [&](const OrderedTensor& left, const OrderedTensor& right, const OrderedTensor& to) {
    const ab_grouped_matmul_dw_args dw{sizeof(dw), 0, left.view(), right.view(), sizes.view(), to.view(), 0, 0};
    EXPECT_OK(call(ab_grouped_matmul_dw, ab_grouped_matmul_dw_workspace, dw));
  };
  outer(x, v, d_a);
  outer(u, d_y, d_b);
  expect(d_a, product.d_a, "d_a");
  expect(d_b, product.d_b, "d_b");
}

TEST(Lora, GroupedMatmulMatchesTheReference) {
  for (const bool shared : {false, true}) {
    check_grouped_matmul(AB_FLOAT32, AB_FLOAT32, shared, shared);
    check_grouped_matmul(AB_BFLOAT16, AB_BFLOAT16, shared, !shared);
    check_grouped_matmul(AB_FLOAT16, AB_FLOAT32, shared, shared);
  }
}

LoraCase in_fp8(int32_t dtype) {
  LoraCase c = in_dtype(dtype, dtype);
  c.precision = AB_PRECISION_FP8;
  c.D = 256;
  c.F = 128;
  return c;
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

TEST(Lora, Fp8AcceptsQuantisedOperands) {
  const int32_t kind = AB_FP8_SCALES_POWER_OF_TWO;
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    LoraCase c = in_fp8(dtype);
    c.factor_dtype = AB_FLOAT32;
    LoraNetwork want(c), net(c);
    want.compute();
    const QuantizedWeights w_in(want.view("w_in"), kind), w_out(want.view("w_out"), kind);

    // Quantised weights alone.
    ab_expert_ffn_forward_args forward = net.forward_args();
    ab_expert_ffn_backward_args backward = net.backward_args();
    forward.w_in_q = w_in.q_transposed.view();
    forward.w_out_q = w_out.q_transposed.view();
    backward.w_in_q = w_in.q.view();
    backward.w_out_q = w_out.q.view();
    forward.w_in_scales = backward.w_in_scales = w_in.scales.view();
    forward.w_out_scales = backward.w_out_scales = w_out.scales.view();
    forward.w_in = forward.w_out = backward.w_in = backward.w_out = nullptr;
    EXPECT_OK(LoraNetwork::run(forward));
    EXPECT_OK(LoraNetwork::run(backward));
    expect_same(net, want, "quantised weights");

    // The first half with `a` quantised, then the second half summed per token. w multiplies late.
    LoraNetwork half(c);
    forward = want.forward_args();
    forward.weights = nullptr;
    EXPECT_OK(LoraNetwork::run(forward));
    const Bytes a_q = e4m3({c.R, c.F}), dh_q({c.R, c.P, c.F}, AB_FLOAT8_E4M3);
    const Floats a_scales({c.R, c.F / kBlock}), dh_scales({c.R, c.P, c.F / kBlock});
    ab_expert_ffn_forward_args up = half.forward_args();
    up.y = up.w_out = up.b_out = up.weights = nullptr;
    up.a = a_q.view();
    up.a_scales = a_scales.view();
    EXPECT_OK(LoraNetwork::run(up));
    EXPECT_TRUE(half["lora_u"].memory().is(want["lora_u"].memory()));
    EXPECT_TRUE(half["lora_z"].memory().is(want["lora_z"].memory()));
    Combined combined(want);
    ab_grouped_matmul_combine_args down = combined.args(a_q.view(), want.view("w_out"));
    down.x_scales = a_scales.view();
    down.weights = want.view("weights");
    down.bias = want.view("b_out");
    down.lora_b = want.view("lora_b_out");
    down.lora_u = half.view("lora_z");
    combined.expect_same("y", down, "quantised a");

    // Quantised tokens alone: z has the dtype of the tokens.
    const QuantizedTensor x_q(want.view("x"), kind);
    remove_in(&up);
    up.h = up.b_in = nullptr;
    EXPECT_OK(LoraNetwork::run(up));
    const OrderedTensor z({c.R, c.rank_out}, c.dtype);
    up.x = nullptr;
    up.x_q = x_q.q.view();
    up.x_scales = x_q.scales.view();
    up.lora_z = z.view();
    EXPECT_OK(LoraNetwork::run(up));
    EXPECT_TRUE(z.memory().is(half["lora_z"].memory()));

    // dx from the quantised dh and from v_in, in a call without h and summed per token.
    backward = want.backward_args();
    backward.dh_q = dh_q.view();
    backward.dh_scales = dh_scales.view();
    EXPECT_OK(LoraNetwork::run(backward));
    ab_expert_ffn_backward_args later = half.backward_args();
    later.h = later.dh = nullptr;
    later.dh_q = dh_q.view();
    later.dh_scales = dh_scales.view();
    later.lora_v_in = want.view("lora_v_in");
    later.d_out = later.d_weights = later.weighted_a = later.d_w_in = later.d_b_in = later.d_w_out = later.d_b_out =
        later.lora_v_out = later.d_lora_a_in = later.d_lora_b_in = later.d_lora_a_out = later.d_lora_b_out = nullptr;
    EXPECT_OK(LoraNetwork::run(later));
    EXPECT_TRUE(half["dx_rows"].memory().is(want["dx_rows"].memory()));
    const ab_tensor dh = merged(dh_q.view()), scales = merged(dh_scales.view()), w = merged(want.view("w_in"));
    const Transposed a(*want.view("lora_a_in"));
    ab_grouped_matmul_combine_args dgrad = combined.args(&dh, &w);
    dgrad.x_scales = &scales;
    dgrad.transpose_w = 1;
    dgrad.lora_b = &a.view;
    dgrad.lora_u = want.view("lora_v_in");
    combined.expect_same("dx_rows", dgrad, "quantised dh");
  }
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

TEST(Lora, GroupedMatmulRefusesBadArguments) {
  LoraNetwork net{LoraCase{}};
  const ab_tensor h = merged(net.view("h")), w_in = merged(net.view("w_in")), b_in = merged(net.view("lora_b_in"));
  LoraCase by_row;
  by_row.by_slot = false;
  LoraNetwork rows(by_row);
  ab_grouped_matmul_args product = grouped_matmul_args(rows.view("x"), &w_in, net.group_sizes.view(), &h);
  ab_grouped_matmul_combine_args combine = Combined(net).args(net.view("weighted_a"), net.view("w_out"));
  (void)combine;
  product.lora_a = net.view("lora_a_in");
  product.lora_b = &b_in;
  product.lora_u = net.view("lora_u");
  const auto refused = [](auto args, auto change, const char* text) {
    change(args);
    EXPECT_REFUSED(call(ab_grouped_matmul, ab_grouped_matmul_workspace, args), AB_INVALID_ARGUMENT, text);
  };
  EXPECT_OK(call(ab_grouped_matmul, ab_grouped_matmul_workspace, product));
  using A = ab_grouped_matmul_args;
  refused(product, [](A& args) { args.lora_b = nullptr; }, "lora_b: got NULL, expected float32 [E or 1, r=2, N=12]");
  refused(product, [](A& args) { args.lora_scale = NAN; }, "lora_scale: got nan, expected a finite number");
  refused(product, [&](A& args) { args.lora_b = net.view("lora_b_out"); }, "lora_b: got float32 (8) [4, 3, 7], exp");
  refused(product, [&](A& args) { args.lora_a = net.view("lora_a_out"); }, "lora_a: got float32 (8) [4, 6, 3], exp");
  refused(
      product, [&](A& args) { args.lora_u = net.view("lora_z"); },
      "lora_u: got float32 (8) [28, 3], expected float32 [R=28, r=2]");
  A given = product;
  given.lora_a = nullptr;
  EXPECT_OK(call(ab_grouped_matmul, ab_grouped_matmul_workspace, given));
  refused(
      given, [](A& args) { args.lora_scale = 1.0f; },
      "lora_scale: got 1, expected 0 without an adapter that it scales");
  refused(given, [](A& args) { args.lora_u = nullptr; }, "lora_a: got NULL, expected float32 [E or 1, D=7, r]");
  refused(given, [](A& args) { args.lora_b = nullptr; }, "lora_b: got NULL, expected float32 [E or 1, r=2, N=12]");
}

}  // namespace
}  // namespace anabranch::testing
