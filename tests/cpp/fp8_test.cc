// The experts' products of quantised factors, against products in double of the numbers that these stand for.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include "anabranch/dispatch.h"
#include "experts_operands.h"
#include "grouped_matmul_args.h"
#include "quantized.h"

namespace anabranch::testing {
namespace {

constexpr double kFloat32Sums = 3e-6;  // of some hundred terms, relative to the norm of what is compared

// Blocks of different sizes of numbers: a scale of another block is far off.
void vary(Floats& tensor, int64_t columns, int64_t block_rows) {
  for (int64_t i = 0; i < tensor.size(); ++i) {
    const int64_t block = i / columns / block_rows * 5 + i % columns / kBlock * 3;
    tensor[i] *= std::ldexp(1.0f, static_cast<int>(block % 4)) * static_cast<float>(3 + block % 5);
  }
}

std::vector<float> slice(const Floats& tensor, int64_t begin, int64_t count) {
  return {tensor.values().begin() + begin, tensor.values().begin() + begin + count};
}

// Each of `parts` equal parts, an expert's for instance, in its own norm.
void expect_parts_near(const Floats& got, const std::vector<double>& want, int64_t parts, const std::string& name) {
  ASSERT_EQ(got.size(), static_cast<int64_t>(want.size())) << name;
  const int64_t count = parts == 0 ? 0 : got.size() / parts;
  for (int64_t part = 0; part < parts; ++part) {
    const auto begin = want.begin() + part * count;
    expect_near(Floats({count}, slice(got, part * count, count)), std::vector<double>(begin, begin + count),
                kFloat32Sums, name + " of " + std::to_string(part));
  }
}

// a [m, k] times b [k, n].
std::vector<double> product(std::span<const double> a, std::span<const double> b, int64_t m, int64_t k, int64_t n) {
  std::vector<double> c(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t p = 0; p < k; ++p) {
      const double factor = a[static_cast<size_t>(i * k + p)];
      for (int64_t j = 0; j < n; ++j) {
        c[static_cast<size_t>(i * n + j)] += factor * b[static_cast<size_t>(p * n + j)];
      }
    }
  }
  return c;
}
std::vector<double> transposed(std::span<const double> a, int64_t rows, int64_t columns) {
  std::vector<double> result(a.size());
  for (int64_t i = 0; i < rows * columns; ++i) {
    result[static_cast<size_t>(i % columns * rows + i / columns)] = a[static_cast<size_t>(i)];
  }
  return result;
}

// Rows quantised by the library.
struct QuantizedTensor {
  Bytes q;
  Floats scales;

  QuantizedTensor(const ab_tensor* x, int32_t kind)
      : q({x->shape[0], x->shape[1]}, AB_FLOAT8_E4M3), scales({x->shape[0], x->shape[1] / kBlock}) {
    const ab_quantize_rows_args args{sizeof(args), kind, x, q.view(), scales.view()};
    EXPECT_OK(call(ab_quantize_rows, ab_quantize_rows_workspace, args));
  }
};

// Weights [E, D, N] or [E, D, P, F] quantised by the library, in both orientations.
struct QuantizedWeights {
  Bytes q, q_transposed;
  Floats scales;

  static std::vector<int64_t> shape_of(const ab_tensor* w, bool transposes) {
    std::vector<int64_t> shape(w->shape, w->shape + w->rank);
    if (transposes) std::rotate(shape.begin() + 1, shape.begin() + 2, shape.end());
    return shape;
  }
  static std::vector<int64_t> blocks_of(const ab_tensor* w) {
    std::vector<int64_t> shape = shape_of(w, false);
    shape[1] /= kBlock;
    shape.back() /= kBlock;
    return shape;
  }
  QuantizedWeights(const ab_tensor* w, int32_t kind)
      : q(shape_of(w, false), AB_FLOAT8_E4M3), q_transposed(shape_of(w, true), AB_FLOAT8_E4M3), scales(blocks_of(w)) {
    const ab_quantize_weights_args args{sizeof(args), kind, w, q.view(), q_transposed.view(), scales.view()};
    EXPECT_OK(call(ab_quantize_weights, ab_quantize_weights_workspace, args));
  }
};

struct Product {
  static constexpr int64_t R = 45, D = 256, N = 384;
  Floats x = random({R, D}, 1);
  Floats w;
  Ints sizes{{4}, {13, 0, 30, 1}};  // one row past the groups
  int32_t transpose_w, kind;

  Product(bool transpose, int32_t fp8_scales)
      : w(transpose ? random({4, N, D}, 2) : random({4, D, N}, 2)), transpose_w(transpose ? 1 : 0), kind(fp8_scales) {
    vary(x, D, 1);
    vary(w, transpose ? D : N, kBlock);
  }

  ab_grouped_matmul_args args(const ab_tensor* y) const {
    ab_grouped_matmul_args args =
        grouped_matmul_args(x.view(), w.view(), sizes.view(), y, transpose_w, AB_PRECISION_FP8);
    args.fp8_scales = kind;
    return args;
  }
  static ab_status run(const ab_grouped_matmul_args& args, int threads = 0) {
    return call(ab_grouped_matmul, ab_grouped_matmul_workspace, args, threads);
  }
  std::vector<double> want() const {
    const std::vector<double> rows = quantize(x.values(), D, 1, kind).values;
    const std::vector<int64_t> offsets = offsets_of(sizes.values(), R);
    std::vector<double> y(R * N);
    for (int64_t e = 0; e < 4; ++e) {
      const QuantizedMatrix q = quantize(slice(w, e * D * N, D * N), transpose_w != 0 ? D : N, kBlock, kind);
      const std::vector<double> matrix = transpose_w != 0 ? transposed(q.values, N, D) : q.values;
      const auto e_ = static_cast<size_t>(e);
      const int64_t count = offsets[e_ + 1] - offsets[e_];
      const std::vector<double> part =
          product(std::span(rows).subspan(static_cast<size_t>(offsets[e_] * D)), matrix, count, D, N);
      std::copy(part.begin(), part.end(), y.begin() + offsets[e_] * N);
    }
    return y;
  }
};

TEST(Fp8, AProductIsThatOfQuantisedFactors) {
  for (const bool transpose : {false, true}) {
    for (const int32_t kind : {AB_FP8_SCALES_FLOAT32, AB_FP8_SCALES_POWER_OF_TWO}) {
      const Product op(transpose, kind);
      const Floats y({Product::R, Product::N});
      EXPECT_OK(Product::run(op.args(y.view())));
      expect_parts_near(y, op.want(), Product::R, "y");

      // The same bits with any factor given, and on any number of threads.
      const QuantizedTensor x(op.x.view(), kind);
      const QuantizedWeights w(op.w.view(), kind);
      for (int given = 0; given < 4; ++given) {
        const Floats same({Product::R, Product::N});
        ab_grouped_matmul_args args = op.args(same.view());
        if (given % 2 == 1) {
          args.x = x.q.view();
          args.x_scales = x.scales.view();
        }
        if (given / 2 == 1) {
          args.w = nullptr;
          args.w_q = transpose ? w.q.view() : w.q_transposed.view();
          args.w_scales = w.scales.view();
        }
        EXPECT_OK(Product::run(args, 1 + given));
        EXPECT_EQ(same.values(), y.values()) << given;
      }
      const Tensor<uint16_t> narrow({Product::R, Product::N});
      ab_grouped_matmul_args args = op.args(narrow.view());
      args.x = x.q.view();
      args.x_scales = x.scales.view();
      EXPECT_OK(Product::run(args));
      for (int64_t i = 0; i < y.size(); ++i) ASSERT_EQ(narrow[i], from_float<BFloat16>(y[i]).bits) << i;
    }
  }
}

TEST(Fp8, WhatIsNoNumberStaysInItsRowAndItsColumns) {
  Product op(false, AB_FP8_SCALES_FLOAT32);
  const Floats clean({Product::R, Product::N}), y({Product::R, Product::N});
  EXPECT_OK(Product::run(op.args(clean.view())));
  op.x[14 * Product::D + 200] = INFINITY;
  op.x[44 * Product::D] = NAN;                                             // past the groups
  op.w[(2 * Product::D + 130) * Product::N + 150] = NAN;                   // expert 2, columns 128 to 255
  for (int64_t j = 0; j < Product::D; ++j) op.x[20 * Product::D + j] = 0;  // zeros do not hide it
  EXPECT_OK(Product::run(op.args(y.view())));
  for (int64_t r = 0; r < Product::R; ++r) {
    for (int64_t n = 0; n < Product::N; ++n) {
      const int64_t i = r * Product::N + n;
      const bool is_none = r == 14 || (r >= 13 && r < 43 && n >= 128 && n < 256);
      if (is_none) {
        ASSERT_TRUE(std::isnan(y[i])) << r << " " << n;
      } else {
        ASSERT_EQ(y[i], r == 20 ? 0.0f : clean[i]) << r << " " << n;
      }
    }
  }
}

// Slots in another order, some rows padding, the last past the groups.
std::vector<int32_t> mixed_slots(int64_t R, int64_t slots) {
  std::vector<int32_t> result;
  int32_t next = static_cast<int32_t>(slots) - 1;
  for (int64_t r = 0; r < R; ++r) result.push_back(r % 5 == 3 || next < 0 ? -1 : next--);
  return result;
}

// A network with what comes of quantised factors beside its own results, which it keeps in float32.
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
    for (float& value : w_in.values()) value *= 0.02f;  // so that activations are not all saturated
  }

  ab_expert_ffn_forward_args up_and_down() const {
    ab_expert_ffn_forward_args args = forward_args();
    args.fp8_scales = kind;
    return args;
  }
  // `a` alone, quantised; with early weights or none.
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

// Every result of the network from those before it, in double.
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
      if (slot < 0) continue;
      const int64_t t = slot / net.K;
      const double w = net.weights[slot];
      const std::vector<double> of_h = product(row(x, t, D), w_in, 1, D, P * F);
      const std::vector<double> of_y = product(row(a_q.values, r, F), w_out, 1, F, D);
      const std::vector<double> of_da = product(row(d_out, t, D), w_out_transposed, 1, D, F);
      std::vector<double> of_dh(static_cast<size_t>(P * F));
      for (int64_t j = 0; j < P * F; ++j) {
        const auto i = static_cast<size_t>(j);
        h[static_cast<size_t>(r * P * F + j)] = of_h[i] + net.b_in[e * P * F + j];
        of_dh[i] = dh_q.values[static_cast<size_t>(r * P * F + j)];
      }
      const std::vector<double> of_dx = product(of_dh, w_in_transposed, 1, P * F, D);
      for (int64_t d = 0; d < D; ++d) {
        const auto i = static_cast<size_t>(r * D + d);
        const double bias = w * net.b_out[e * D + d];
        y[i] = (net.early != 0 ? 1.0 : w) * of_y[static_cast<size_t>(d)] + bias;
        dx_rows[i] = of_dx[static_cast<size_t>(d)];
        d_b_out[static_cast<size_t>(e * D + d)] += w * net.d_out[t * D + d];
        d_weights[static_cast<size_t>(slot)] += net.d_out[t * D + d] * net.b_out[e * D + d];
      }
      for (int64_t f = 0; f < F; ++f) {
        const double gate = net.h[r * P * F + f];
        const double up = P == 1 ? 1.0 : net.h[(r * P + 1) * F + f];
        const double sigmoid = 1 / (1 + std::exp(-gate));
        const double silu = gate * sigmoid;
        const double da = of_da[static_cast<size_t>(f)];
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

TEST(Fp8, TheNetworkIsThatOfQuantisedFactors) {
  for (const int32_t early : {0, 1}) {
    QuantizedNetwork net(early == 0 ? 2 : 1, early == 0 ? AB_FP8_SCALES_FLOAT32 : AB_FP8_SCALES_POWER_OF_TWO);
    net.early = early;
    net.compute();
    Expected(net).compare();
  }
}

void expect_same_results(const QuantizedNetwork& got, const QuantizedNetwork& want) {
  const auto all = [](const QuantizedNetwork& net) {
    return std::vector<const Floats*>{&net.y,         &net.h,        &net.dh,       &net.dx_rows,
                                      &net.d_w_in,    &net.d_b_in,   &net.d_w_out,  &net.d_b_out,
                                      &net.d_weights, &net.a_scales, &net.dh_scales};
  };
  for (size_t i = 0; i < all(got).size(); ++i) EXPECT_EQ(all(got)[i]->values(), all(want)[i]->values()) << i;
  EXPECT_EQ(got.a_q.values(), want.a_q.values());
  EXPECT_EQ(got.dh_q.values(), want.dh_q.values());
}

TEST(Fp8, TheNetworkHasTheSameBitsForEveryThreadCount) {
  const QuantizedNetwork one(2, 0), many(2, 0);
  one.compute(1);
  many.compute(5);
  expect_same_results(many, one);
}

TEST(Fp8, WeightsGivenQuantisedAreAsGood) {
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

// Tokens and cotangents that come quantised are multiplied as they are, whatever else stands in x and d_out.
TEST(Fp8, RowsGivenQuantisedAreAsGood) {
  const int32_t kind = AB_FP8_SCALES_POWER_OF_TWO;
  const QuantizedNetwork want(2, kind), net(2, kind);
  want.compute();
  const QuantizedTensor x(net.x.view(), kind), d_out(net.d_out.view(), kind);
  for (ab_expert_ffn_forward_args args : {net.up_and_down(), net.up()}) {
    args.x = nullptr;
    args.x_q = x.q.view();
    args.x_scales = x.scales.view();
    EXPECT_OK(QuantizedNetwork::run(args));
  }
  ab_expert_ffn_backward_args backward = net.backward_all();
  backward.d_out_q = d_out.q.view();
  backward.d_out_scales = d_out.scales.view();
  EXPECT_OK(QuantizedNetwork::run(backward));
  expect_same_results(net, want);

  const Floats nothing({net.T, net.D}, std::vector<float>(net.d_out.values().size()));
  backward.d_out = nothing.view();
  EXPECT_OK(QuantizedNetwork::run(backward));
  EXPECT_TRUE(same_bits(net.dh.values(), want.dh.values()));
  EXPECT_TRUE(std::ranges::all_of(net.d_w_out.values(), [](float value) { return value == 0.0f; }));
}

// Weights of another dtype than the rows are quantised from what they are.
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

// What the layer does: the first half and the sum of the second, dh and the sum of its product.
TEST(Fp8, RowsAreSummedAsTheyAreComputed) {
  for (const int32_t early : {0, 1}) {
    QuantizedNetwork net(2, AB_FP8_SCALES_FLOAT32);
    net.early = early;
    net.compute();
    Ints row_of_slot({net.T, net.K});
    for (int64_t r = 0; r < net.R; ++r) {
      if (net.slot_of_row[r] >= 0) row_of_slot[net.slot_of_row[r]] = static_cast<int32_t>(r);
    }
    const QuantizedWeights w_in(net.w_in.view(), net.kind), w_out(net.w_out.view(), net.kind);
    const Floats got({net.T, net.D}), want({net.T, net.D});
    const auto summed = [&](const Floats& rows, ab_grouped_matmul_combine_args args, const ab_tensor* weights) {
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
      summed(net.y, down, nullptr);
    } else {
      ab_expert_ffn_forward_args plain = net.up_and_down();  // rows that the sum weights
      plain.weights = nullptr;
      EXPECT_OK(QuantizedNetwork::run(plain));
      down.bias = net.b_out.view();
      down.weights = net.weights.view();
      summed(net.y, down, net.weights.view());
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
    summed(net.dx_rows, dgrad, nullptr);
  }
}

// Operands of bfloat16 give the `a` of float32 operands of the same values: it is not rounded before it is quantised,
// though it is when it is kept. dh is.
TEST(Fp8, HiddenRowsAreQuantisedFromFloat32AndTheirGradientAsItStands) {
  QuantizedNetwork wide(2, AB_FP8_SCALES_FLOAT32);
  Network<uint16_t> narrow(wide.T, wide.K, wide.D, wide.P, wide.F, wide.group_sizes.values(),
                           wide.slot_of_row.values());
  narrow.precision = AB_PRECISION_FP8;
  const auto widen = [](const Tensor<uint16_t>& from, Floats& to) {
    for (int64_t i = 0; i < from.size(); ++i) to[i] = to_float(BFloat16{from[i]});
  };
  widen(narrow.x, wide.x);
  widen(narrow.w_in, wide.w_in);
  widen(narrow.b_in, wide.b_in);
  widen(narrow.w_out, wide.w_out);
  widen(narrow.b_out, wide.b_out);
  widen(narrow.d_out, wide.d_out);
  wide.compute();
  const Bytes a_q = e4m3({wide.R, wide.F}), dh_q = e4m3({wide.R, wide.P, wide.F});
  const Floats a_scales({wide.R, wide.F / kBlock}), dh_scales({wide.R, wide.P, wide.F / kBlock});
  ab_expert_ffn_forward_args up = narrow.forward_args();
  up.y = up.w_out = up.b_out = up.weights = nullptr;
  up.a = a_q.view();
  up.a_scales = a_scales.view();
  EXPECT_OK(QuantizedNetwork::run(up));
  EXPECT_EQ(a_q.values(), wide.a_q.values());
  EXPECT_EQ(a_scales.values(), wide.a_scales.values());
  for (int64_t i = 0; i < wide.h.size(); ++i) ASSERT_EQ(narrow.h[i], from_float<BFloat16>(wide.h[i]).bits);

  ab_expert_ffn_backward_args backward = narrow.backward_args();
  backward.dh_q = dh_q.view();
  backward.dh_scales = dh_scales.view();
  EXPECT_OK(QuantizedNetwork::run(backward));
  widen(narrow.dh, wide.dh);
  const QuantizedMatrix dh = quantize(wide.dh.values(), wide.F, 1, AB_FP8_SCALES_FLOAT32);
  EXPECT_EQ(dh_q.values(), dh.q);
  EXPECT_TRUE(same_bits(dh_scales.values(), dh.scales));

  // What follows from it is that of float32 operands, too.
  ab_expert_ffn_backward_args rest = wide.backward_all();
  rest.h = nullptr;
  rest.d_weights = nullptr;
  rest.dh_q = rest.dh_scales = nullptr;
  EXPECT_OK(QuantizedNetwork::run(rest));
  for (int64_t i = 0; i < wide.dx_rows.size(); ++i) {
    ASSERT_EQ(narrow.dx_rows[i], from_float<BFloat16>(wide.dx_rows[i]).bits);
  }
}

// The first call gives dh, the second what follows from it: from dh_q, or from dh as it stands, which is float32 here.
TEST(Fp8, TheBackwardPassMayBeSeveralCalls) {
  const QuantizedNetwork want(2, AB_FP8_SCALES_FLOAT32);
  want.compute();
  for (const bool keeps_quantised : {true, false}) {
    const QuantizedNetwork net(2, AB_FP8_SCALES_FLOAT32);
    EXPECT_OK(QuantizedNetwork::run(net.up_and_down()));
    EXPECT_OK(QuantizedNetwork::run(net.up()));
    ab_expert_ffn_backward_args first = net.backward_all();
    first.dx_rows = first.d_w_in = first.d_w_out = first.d_b_in = first.d_b_out = nullptr;
    ab_expert_ffn_backward_args second = net.backward_all();
    second.h = nullptr;
    second.d_weights = nullptr;
    if (!keeps_quantised) second.dh_q = second.dh_scales = nullptr;
    EXPECT_OK(QuantizedNetwork::run(first));
    EXPECT_OK(QuantizedNetwork::run(second));
    expect_same_results(net, want);
  }
}

TEST(Fp8, EmptySizesAreOrdinary) {
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

TEST(Fp8, ProductsRefuseWhatDoesNotFit) {
  const Product op(false, AB_FP8_SCALES_FLOAT32);
  const Floats y({Product::R, Product::N}), narrow({Product::R, 100}), odd({1, 1});
  const Floats w_ragged({4, 256, 100});
  const QuantizedTensor x(op.x.view(), 0);
  const QuantizedWeights w(op.w.view(), 0);
  const auto refused = [&](auto change, const char* text) {
    ab_grouped_matmul_args args = op.args(y.view());
    args.w_q = w.q_transposed.view();
    args.w_scales = w.scales.view();
    change(args);
    EXPECT_REFUSED(Product::run(args), AB_INVALID_ARGUMENT, text);
    EXPECT_REFUSED(ab_grouped_matmul(&args, nullptr), AB_INVALID_ARGUMENT, text);
  };
  const auto other_precision = [](auto& args) { args.precision = AB_PRECISION_TF32; };
  refused(other_precision, "w_q: got a tensor, expected NULL without AB_PRECISION_FP8");
  refused(
      [&](auto& args) {
        other_precision(args);
        args.w_q = args.w_scales = nullptr;
        args.x = x.q.view();
      },
      "x: got float8_e4m3 (9) [45, 256], expected float16 or bfloat16 or float32 [R, D]");
  refused(
      [&](auto& args) {
        other_precision(args);
        args.w_q = args.w_scales = nullptr;
        args.fp8_scales = 1;
      },
      "fp8_scales: got 1, expected 0 without AB_PRECISION_FP8");
  refused([](auto& args) { args.fp8_scales = 2; }, "fp8_scales: got 2, expected 0 or 1, an ab_fp8_scales");
  refused([&](auto& args) { args.x = narrow.view(); }, "x: got D=100, expected a multiple of 128");
  refused([&](auto& args) { args.w = w_ragged.view(); }, "w: got N=100, expected a multiple of 128");
  refused([&](auto& args) { args.x = x.q.view(); }, "x_scales: got NULL, expected float32 [R=45, D/128=2]");
  refused([&](auto& args) { args.x_scales = x.scales.view(); },
          "x_scales: got a tensor, expected NULL where x is not float8_e4m3");
  refused([](auto& args) { args.w_scales = nullptr; }, "w_scales: got NULL, expected float32 [E=4, D/128=2, N/128=3]");
  refused([](auto& args) { args.w_q = nullptr; }, "w_q: got NULL, expected float8_e4m3 [E=4, N=384, D=256]");
  refused([](auto& args) { args.w = args.w_q = args.w_scales = nullptr; }, "w: got NULL, expected float16");
  refused([&](auto& args) { args.w_q = w.q.view(); },
          "w_q: got float8_e4m3 (9) [4, 256, 384], expected float8_e4m3 [E=4, N=384, D=256]");
  refused([&](auto& args) { args.w_q = op.w.view(); }, "w_q: got float32 (8) [4, 256, 384], expected float8_e4m3");
  refused([&](auto& args) { args.w = w.q.view(); },
          "w: got float8_e4m3 (9) [4, 256, 384], expected float16 or bfloat16 or float32");
  refused([&](auto& args) { args.w_scales = odd.view(); }, "w_scales: got float32 (8) [1, 1], expected");
  refused([&](auto& args) { args.y = w.q.view(); }, "y: got float8_e4m3");
}

TEST(Fp8, TheNetworkRefusesWhatDoesNotFit) {
  const QuantizedNetwork net(2, AB_FP8_SCALES_FLOAT32);
  net.compute();
  const QuantizedWeights w_in(net.w_in.view(), 0), w_out(net.w_out.view(), 0);
  const Bytes swapped = e4m3({net.E, net.F, net.P, net.D});
  const Floats odd({1, 1});
  const auto forward_refused = [&](auto change, const char* text) {
    ab_expert_ffn_forward_args args = net.up_and_down();
    args.w_in_q = w_in.q_transposed.view();
    args.w_in_scales = w_in.scales.view();
    args.w_out_q = w_out.q_transposed.view();
    args.w_out_scales = w_out.scales.view();
    change(args);
    EXPECT_REFUSED(QuantizedNetwork::run(args), AB_INVALID_ARGUMENT, text);
  };
  const auto without = [](auto& args) {
    args.precision = AB_PRECISION_HIGHEST;
    args.w_in_q = args.w_in_scales = args.w_out_q = args.w_out_scales = nullptr;
  };
  forward_refused([](auto& args) { args.precision = 0; },
                  "w_in_q: got a tensor, expected NULL without AB_PRECISION_FP8");
  forward_refused(
      [&](auto& args) {
        without(args);
        args.w_out_scales = w_out.scales.view();
      },
      "w_out_scales: got a tensor, expected NULL without AB_PRECISION_FP8");
  forward_refused(
      [&](auto& args) {
        without(args);
        args.a = net.a.view();
        args.a_scales = net.a_scales.view();
      },
      "a_scales: got a tensor, expected NULL without AB_PRECISION_FP8");
  forward_refused(
      [&](auto& args) {
        without(args);
        args.a = net.a_q.view();
      },
      "a: got float8_e4m3 (9) [70, 384], expected float32 [R=70, F=384]");
  forward_refused([&](auto& args) { args.a = net.a_q.view(); }, "a_scales: got NULL, expected float32 [R=70, F/128=3]");
  forward_refused(
      [&](auto& args) {
        args.a = net.a.view();
        args.a_scales = net.a_scales.view();
      },
      "a_scales: got a tensor, expected NULL where a is not float8_e4m3");
  forward_refused([&](auto& args) { args.a_scales = net.a_scales.view(); },
                  "a_scales: got a tensor, expected NULL where a is not float8_e4m3");
  forward_refused([&](auto& args) { args.w_in_q = w_in.q.view(); },
                  "w_in_q: got float8_e4m3 (9) [4, 256, 2, 384], expected float8_e4m3 [E=4, P=2, F=384, D=256]");
  forward_refused([](auto& args) { args.w_in_scales = nullptr; },
                  "w_in_scales: got NULL, expected float32 [E=4, D/128=2, P=2, F/128=3]");
  forward_refused(
      [&](auto& args) {
        args.w_in = nullptr;
        args.w_in_q = swapped.view();
      },
      "w_in_q: got 384 parts, expected 2 (gate, up) or 1");
  forward_refused([&](auto& args) { args.w_out_q = w_out.q.view(); },
                  "w_out_q: got float8_e4m3 (9) [4, 384, 256], exp");
  forward_refused([&](auto& args) { args.w_out_scales = odd.view(); },
                  "w_out_scales: got float32 (8) [1, 1], expected");
  forward_refused(
      [&](auto& args) {
        args.a = net.a.view();
        args.y = args.w_out = args.b_out = args.weights = nullptr;
      },
      "w_out_q: got a tensor, expected NULL without y");
  forward_refused([&](auto& args) { args.x = w_out.q.view(); }, "x: got float8_e4m3");
  const QuantizedTensor x(net.x.view(), 0);
  forward_refused(
      [&](auto& args) {
        without(args);
        args.x_q = x.q.view();
      },
      "x_q: got a tensor, expected NULL without AB_PRECISION_FP8");
  forward_refused([&](auto& args) { args.x_q = x.q.view(); }, "x_scales: got NULL, expected float32 [T=30, D/128=2]");
  forward_refused([&](auto& args) { args.x_scales = x.scales.view(); },
                  "x_q: got NULL, expected float8_e4m3 [T=30, D=256]");
  forward_refused([](auto& args) { args.x = nullptr; }, "x: got NULL, expected");
  forward_refused(
      [&](auto& args) {
        args.x = nullptr;
        args.x_q = net.x.view();
      },
      "x_q: got float32 (8) [30, 256], expected float8_e4m3 [T, D]");

  const auto backward_refused = [&](auto change, const char* text) {
    ab_expert_ffn_backward_args args = net.backward_all();
    change(args);
    EXPECT_REFUSED(QuantizedNetwork::run(args), AB_INVALID_ARGUMENT, text);
  };
  backward_refused([](auto& args) { args.precision = 1; },
                   "dh_q: got a tensor, expected NULL without AB_PRECISION_FP8");
  backward_refused([](auto& args) { args.dh_scales = nullptr; },
                   "dh_scales: got NULL, expected float32 [R=70, P=2, F/128=3]");
  backward_refused([](auto& args) { args.dh_q = nullptr; }, "dh_q: got NULL, expected float8_e4m3 [R=70, P=2, F=384]");
  backward_refused(
      [&](auto& args) {
        args.w_in_q = w_in.q_transposed.view();
        args.w_in_scales = w_in.scales.view();
      },
      "w_in_q: got float8_e4m3 (9) [4, 2, 384, 256], expected float8_e4m3 [E=4, D=256, P=2, F=384]");
  backward_refused([&](auto& args) { args.w_out_q = w_out.q.view(); }, "w_out_scales: got NULL, expected");
  backward_refused([](auto& args) { args.h = args.d_weights = args.dx_rows = nullptr; },
                   "dh_q: got a tensor, expected NULL without h, or dx_rows");
  const QuantizedTensor d_out(net.d_out.view(), 0);
  const auto quantised = [&](auto& args) {
    args.d_out_q = d_out.q.view();
    args.d_out_scales = d_out.scales.view();
  };
  backward_refused(
      [&](auto& args) {
        args.precision = 1;
        args.dh_q = args.dh_scales = nullptr;
        quantised(args);
      },
      "d_out_q: got a tensor, expected NULL without AB_PRECISION_FP8");
  backward_refused(
      [&](auto& args) {
        quantised(args);
        args.d_out_scales = nullptr;
      },
      "d_out_scales: got NULL, expected float32 [T=30, D/128=2]");
  backward_refused(
      [&](auto& args) {
        quantised(args);
        args.d_out = nullptr;
      },
      "d_out: got NULL, expected");
  backward_refused(
      [&](auto& args) {
        quantised(args);
        args.h = args.d_weights = nullptr;
      },
      "d_out_q: got a tensor, expected NULL without h");

  Network<float> ragged(3, 2, 100, 2, 128, {6}, slots_in_order(6));
  ragged.precision = AB_PRECISION_FP8;
  EXPECT_REFUSED(ragged.forward(), AB_INVALID_ARGUMENT, "x: got D=100, expected a multiple of 128");
  Network<float> thin(3, 2, 128, 2, 100, {6}, slots_in_order(6));
  thin.precision = AB_PRECISION_FP8;
  EXPECT_REFUSED(thin.forward(), AB_INVALID_ARGUMENT, "w_in: got F=100, expected a multiple of 128");
  EXPECT_REFUSED(thin.backward(), AB_INVALID_ARGUMENT, "w_in: got F=100, expected a multiple of 128");
}

}  // namespace
}  // namespace anabranch::testing
