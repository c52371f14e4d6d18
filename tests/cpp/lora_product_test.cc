// Grouped GEMMs with adapters, alone and in place of the second half of the expert MLP.
#include <array>

#include "anabranch/dispatch.h"
#include "grouped_matmul_args.h"
#include "lora_network.h"

namespace anabranch::testing {
namespace {

ab_status run(const ab_grouped_matmul_args& args) { return call(ab_grouped_matmul, ab_grouped_matmul_workspace, args); }
ab_status run(const ab_grouped_matmul_dw_args& args) {
  return call(ab_grouped_matmul_dw, ab_grouped_matmul_dw_workspace, args);
}
ab_status run(const ab_grouped_matmul_combine_args& args) {
  return call(ab_grouped_matmul_combine, ab_grouped_matmul_combine_workspace, args);
}

// Sums the rows of a network per token: combine after the network, and grouped_matmul_combine in its place.
struct Combined {
  LoraNetwork& net;
  Ints row_of_slot;
  OrderedTensor want, got;

  explicit Combined(LoraNetwork& network)
      : net(network),
        row_of_slot(invert(net.slot_of_row, net.c.T, net.c.K)),
        want({net.c.T, net.c.D}, net.c.dtype),
        got({net.c.T, net.c.D}, net.c.dtype) {}

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
    EXPECT_OK(run(args));
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
  EXPECT_OK(run(args));
  expect(y, want["y"], "y");
  expect(u, want["u"], "u");
  const OrderedTensor again({R, N}, dtype);
  args.y = again.view();
  args.lora_u = nullptr;
  EXPECT_OK(run(args));
  EXPECT_TRUE(again.memory().is(y.memory()));
  args.lora_scale = 0.0f;
  args.lora_a = nullptr;
  args.lora_u = u.view();
  EXPECT_OK(run(args));
  EXPECT_TRUE(again.memory().is(y.memory()));

  const Transposed b_t(*b.view()), a_t(*a.view());
  ab_grouped_matmul_args backward =
      grouped_matmul_args(d_y.view(), &stored_w, sizes.view(), d_x.view(), transposed_w ? 0 : 1);
  backward.lora_scale = 0.5f;
  backward.lora_a = &b_t.view;
  backward.lora_b = &a_t.view;
  backward.lora_u = v.view();
  EXPECT_OK(run(backward));
  expect(d_x, want["d_x"], "d_x");
  expect(v, want["v"], "v");
  const auto outer = [&](const OrderedTensor& left, const OrderedTensor& right, const OrderedTensor& to) {
    const ab_grouped_matmul_dw_args dw{sizeof(dw), 0, left.view(), right.view(), sizes.view(), to.view(), 0, 0};
    EXPECT_OK(run(dw));
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

TEST(Lora, Fp8AcceptsQuantisedOperands) {
  const int32_t kind = AB_FP8_SCALES_POWER_OF_TWO;
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    LoraCase c = in_fp8(dtype);
    c.F = 256;
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

// The gradient that experts share is the sum of theirs, in any dtype of the operands and of the gradient.
TEST(Lora, SharedGradientsAreSums) {
  const int64_t R = 1600, D = 5, N = 6;
  for (const std::vector<int32_t>& group_sizes : {std::vector<int32_t>{30, 0, 1500, 1}, {0, 0}, {}}) {
    const auto E = static_cast<int64_t>(group_sizes.size());
    const Ints sizes({E}, group_sizes);
    for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
      OrderedTensor x({R, D}, dtype), d_y({R, N}, dtype);
      const std::vector<float> values = noise(R * (D + N), 3);
      for (int64_t i = 0; i < R * D; ++i) x.set(i, values[static_cast<size_t>(i)]);
      for (int64_t i = 0; i < R * N; ++i) d_y.set(i, values[static_cast<size_t>(R * D + i)]);
      const Floats each({E, D, N}), sum({1, D, N});
      const OrderedTensor rounded({1, D, N}, dtype);
      Floats added({1, D, N}, noise(D * N, 4));
      const Floats before({1, D, N}, added.values());
      const auto gradient = [&](const ab_tensor* d_w, int32_t accumulate) {
        const ab_grouped_matmul_dw_args args{sizeof(args), accumulate, x.view(), d_y.view(), sizes.view(), d_w, 0, 0};
        EXPECT_OK(run(args));
      };
      gradient(each.view(), 0);
      gradient(sum.view(), 0);
      gradient(rounded.view(), 0);
      gradient(added.view(), 1);
      Doubles want(static_cast<size_t>(D * N));
      for (int64_t i = 0; i < each.size(); ++i) want[static_cast<size_t>(i % (D * N))] += each[i];
      expect_near(sum, want, 1e-6, "sum");
      for (int64_t i = 0; i < sum.size(); ++i) {
        OrderedTensor expected({1}, dtype);
        expected.set(0, sum[i]);
        EXPECT_EQ(rounded[i], expected[0]);
      }
      expect_accumulated(added, before, sum);
    }
  }
}

// Quantised rows read u, since A does not multiply them. y decides the dtype of u then.
TEST(Lora, QuantisedRowsOfAGroupedMatmulReadU) {
  LoraCase c = in_fp8(AB_BFLOAT16);
  c.by_slot = false;
  LoraNetwork net(c);
  const QuantizedTensor x_q(net.view("x"), 0);
  const OrderedTensor y({c.R, c.F}, c.dtype), again({c.R, c.F}, c.dtype), single({c.R, c.F}, AB_FLOAT32);
  const ab_tensor w = *net.view("w_out");  // [E, F, D] with D = F
  ab_grouped_matmul_args args =
      grouped_matmul_args(net.view("x"), &w, net.group_sizes.view(), y.view(), 0, AB_PRECISION_FP8);
  args.lora_scale = 2.0f;
  args.lora_a = net.view("lora_a_out");
  args.lora_b = net.view("lora_b_out");
  args.lora_u = net.view("lora_z");
  EXPECT_OK(run(args));
  args.x = x_q.q.view();
  args.x_scales = x_q.scales.view();
  args.y = again.view();
  EXPECT_REFUSED(run(args), AB_INVALID_ARGUMENT, "lora_a: got a tensor, expected NULL and lora_u if x is quantised");
  args.lora_scale = 0.0f;
  args.lora_a = nullptr;
  EXPECT_OK(run(args));
  EXPECT_TRUE(again.memory().is(y.memory()));
  args.y = single.view();
  EXPECT_REFUSED(run(args), AB_INVALID_ARGUMENT, "lora_u: got bfloat16 (7) [28, 3], expected float32 [R=28, r]");
}

TEST(Lora, GroupedMatmulRefusesBadArguments) {
  LoraNetwork net{LoraCase{}};
  const ab_tensor h = merged(net.view("h")), w_in = merged(net.view("w_in")), b_in = merged(net.view("lora_b_in"));
  LoraCase by_row;
  by_row.by_slot = false;
  LoraNetwork rows(by_row);
  ab_grouped_matmul_args product = grouped_matmul_args(rows.view("x"), &w_in, net.group_sizes.view(), &h);
  product.lora_a = net.view("lora_a_in");
  product.lora_b = &b_in;
  product.lora_u = net.view("lora_u");
  EXPECT_OK(run(product));
  using A = ab_grouped_matmul_args;
  const auto refused = [](auto args, auto change, const char* text) {
    change(args);
    EXPECT_REFUSED(run(args), AB_INVALID_ARGUMENT, text);
  };
  refused(product, [](A& args) { args.lora_b = nullptr; }, "lora_b: got NULL, expected float32 [E or 1, r=2, N=12]");
  refused(product, [](A& args) { args.lora_scale = NAN; }, ", expected a finite number");
  refused(product, [&](A& args) { args.lora_b = net.view("lora_b_out"); }, "lora_b: got float32 (8) [4, 3, 7], exp");
  refused(product, [&](A& args) { args.lora_a = net.view("lora_a_out"); }, "lora_a: got float32 (8) [4, 6, 3], exp");
  refused(
      product, [&](A& args) { args.lora_u = net.view("lora_z"); },
      "lora_u: got float32 (8) [28, 3], expected float32 [R=28, r=2]");
  refused(product, [](A& args) { args.lora_a = args.lora_b = nullptr; }, "lora_b: got NULL, expected float32");
  refused(
      product,
      [](A& args) {
        args.lora_a = args.lora_b = args.lora_u = nullptr;
        args.lora_scale = 1.0f;
      },
      "lora_scale: got 1, expected 0 without an adapter that it scales");
  A given = product;
  given.lora_a = nullptr;
  EXPECT_OK(run(given));
  refused(
      given, [](A& args) { args.lora_scale = 1.0f; },
      "lora_scale: got 1, expected 0 without an adapter that it scales");
  refused(given, [](A& args) { args.lora_u = nullptr; }, "lora_a: got NULL, expected float32 [E or 1, D=7, r]");
  const OrderedTensor no_u({28, 0}, AB_FLOAT32), no_b({4, 0, 12}, AB_FLOAT32);
  refused(
      given,
      [&](A& args) {
        args.lora_u = no_u.view();
        args.lora_b = no_b.view();
      },
      "lora_u: got rank 0, expected at least 1");

  net.compute();
  const Combined combined(net);
  using C = ab_grouped_matmul_combine_args;
  C sum = combined.args(net.view("a"), net.view("w_out"));
  sum.lora_b = net.view("lora_b_out");
  sum.lora_u = net.view("lora_z");
  EXPECT_OK(run(sum));
  refused(sum, [](C& args) { args.lora_b = nullptr; }, "lora_b: got NULL, expected float32 [E or 1, r=3, N=7]");
  refused(sum, [&](C& args) { args.lora_a = net.view("lora_a_in"); }, "lora_a: got float32 (8) [4, 7, 2], expected");
  refused(sum, [](C& args) { args.lora_scale = 2.0f; }, "lora_scale: got 2, expected 0 without an adapter that it");

  const Floats d_w({2, 7, 6});
  const ab_grouped_matmul_dw_args dw{
      sizeof(dw), 0, net.view("dx_rows"), net.view("a"), net.group_sizes.view(), d_w.view(), 0, 0};
  EXPECT_REFUSED(run(dw), AB_INVALID_ARGUMENT, "d_w: got 2 matrices, expected E=4, or 1 that all experts share");
}

}  // namespace
}  // namespace anabranch::testing
