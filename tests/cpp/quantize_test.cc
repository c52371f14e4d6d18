// Quantisation of rows and weights to e4m3 with block scales, against a search over all e4m3 values.
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "experts_operands.h"
#include "float_tensor.h"
#include "quantized.h"

namespace anabranch::testing {
namespace {

constexpr int32_t kScaleKinds[] = {AB_FP8_SCALES_FLOAT32, AB_FP8_SCALES_POWER_OF_TWO};
constexpr int32_t kDtypes[] = {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16};

TEST(E4m3, DecodesEveryBitPattern) {
  for (int bits = 0; bits < 256; ++bits) {
    const double want = e4m3_value(static_cast<uint8_t>(bits));
    const float got = to_float(Float8E4M3{static_cast<uint8_t>(bits)});
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
    } else {
      EXPECT_EQ(got, static_cast<float>(want)) << bits;
      EXPECT_EQ(std::signbit(got), bits >= 128) << bits;
    }
  }
}

TEST(E4m3, RoundsToTheNearestTiesToEven) {
  const auto expect_nearest = [](float value) {
    EXPECT_EQ(from_float<Float8E4M3>(value).bits, nearest_e4m3(value)) << value;
    EXPECT_EQ(from_float<Float8E4M3>(-value).bits, nearest_e4m3(-value)) << -value;
  };
  for (int bits = 0; bits < 0x7e; ++bits) {
    const auto low = static_cast<float>(e4m3_value(static_cast<uint8_t>(bits)));
    const auto high = static_cast<float>(e4m3_value(static_cast<uint8_t>(bits + 1)));
    const float tie = (low + high) / 2;
    for (const float value : {low, tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 1e9f), high}) {
      expect_nearest(value);
    }
  }
  for (const float value : {1e-40f, 448.5f, 463.9f, 464.0f, 1e30f, std::numeric_limits<float>::infinity()}) {
    expect_nearest(value);
  }
  EXPECT_EQ(from_float<Float8E4M3>(NAN).bits, 0x7f);
  EXPECT_EQ(from_float<Float8E4M3>(-NAN).bits, 0x7f);
}

// Fills x with normal random numbers and puts one special kind of block into each of the first rows.
void fill_rows(FloatTensor& x, int64_t D) {
  x.fill_normal(3);
  const int64_t rows = x.size() / D;
  const auto place = [&](int64_t row, const std::function<float(int64_t)>& value) {
    for (int64_t j = 0; row < rows && j < kBlock; ++j) x.set(row * D + j, value(j));
  };
  place(0, [](int64_t) { return 0.0f; });
  place(1, [](int64_t j) { return j % 2 == 0 ? -0.0f : 0.0f; });
  place(2, [](int64_t j) { return j == 77 ? 1e4f : 0.01f * static_cast<float>(j); });  // an outlier
  place(3, [](int64_t j) { return j == 5 ? std::numeric_limits<float>::infinity() : 1.0f; });
  place(4, [](int64_t j) { return j == 127 ? -std::numeric_limits<float>::quiet_NaN() : 1.0f; });
  place(5, [](int64_t j) { return std::ldexp(static_cast<float>(j - 64), -149); });  // float32 denormals
  place(6,
        [](int64_t j) { return std::ldexp(static_cast<float>(j), -125); });  // scales near the smallest normal float32
  place(7, [](int64_t j) { return std::ldexp(static_cast<float>(7 * j % 449), -10); });
  place(8, [](int64_t j) { return std::ldexp(448.0f, static_cast<int>(j) % 20); });  // a power-of-two scale
}

TEST(QuantizeRows, MatchTheFormula) {
  for (const int32_t dtype : kDtypes) {
    for (const int32_t kind : kScaleKinds) {
      for (const int64_t D : {128, 384}) {
        const int64_t R = 35;
        FloatTensor x({R, D}, dtype);
        fill_rows(x, D);
        std::vector<float> values;
        for (int64_t i = 0; i < R * D; ++i) values.push_back(x.get(i));
        const QuantizedMatrix want = quantize(values, D, 1, kind);
        const Bytes q = e4m3({R, D});
        const Floats scales({R, D / kBlock});
        const ab_quantize_rows_args args{sizeof(args), kind, x.view(), q.view(), scales.view()};
        EXPECT_OK(call(ab_quantize_rows, ab_quantize_rows_workspace, args));
        EXPECT_EQ(q.values(), want.q) << dtype << " " << kind;
        EXPECT_TRUE(same_bits(scales.values(), want.scales)) << dtype << " " << kind;
      }
    }
  }
}

// A block with NaN or infinity becomes NaN with one bit pattern, whatever value caused it.
TEST(QuantizeRows, ANonFiniteValueMakesItsBlockNaN) {
  const Floats x({1, 256}, std::vector<float>(256, 2.0f));
  const_cast<Floats&>(x)[130] = -std::numeric_limits<float>::infinity();
  const Bytes q = e4m3({1, 256});
  const Floats scales({1, 2});
  const ab_quantize_rows_args args{sizeof(args), 0, x.view(), q.view(), scales.view()};
  EXPECT_OK(call(ab_quantize_rows, ab_quantize_rows_workspace, args));
  EXPECT_EQ(bits_of(scales[0]), bits_of(2.0f / 448.0f));
  EXPECT_EQ(bits_of(scales[1]), 0x7fc00000u);
  for (int64_t j = 0; j < 256; ++j) ASSERT_EQ(q[j], j < 128 ? 0x7e : 0x7f) << j;
}

// The result does not depend on the memory order of the weights [E, D, P, F] or [E, D, F].
TEST(QuantizeWeights, MatchTheFormulaInEveryOrder) {
  struct Order {
    std::vector<int> axes;
    int64_t P;  // 0: no axis P
  };
  const Order orders[] = {{{0, 1, 2, 3}, 2}, {{0, 2, 3, 1}, 2}, {{0, 1, 3, 2}, 2}, {{0, 3, 2, 1}, 2},
                          {{0, 1, 2, 3}, 1}, {{0, 1, 2}, 0},    {{0, 2, 1}, 0}};
  constexpr int64_t E = 2, D = 256, F = 384;
  for (const Order& order : orders) {
    const int64_t P = std::max<int64_t>(order.P, 1);
    const int32_t dtype = kDtypes[(order.axes[1] + P) % 3];
    const int32_t kind = kScaleKinds[order.axes[2] % 2];
    const std::vector<int64_t> shape = order.P == 0 ? std::vector<int64_t>{E, D, F} : std::vector<int64_t>{E, D, P, F};
    FloatTensor w(shape, dtype);
    w.fill_normal(11);
    w.set(D * P * F + 200 * P * F + 300, NAN);  // expert 1, d 200: one block of part 0
    int64_t strides[4] = {};
    int64_t stride = 1;
    for (size_t i = order.axes.size(); i-- > 0;) {
      strides[order.axes[i]] = stride;
      stride *= shape[static_cast<size_t>(order.axes[i])];
    }
    const int64_t f_stride = strides[order.P == 0 ? 2 : 3];
    const int64_t p_stride = order.P == 0 ? 0 : strides[2];
    const auto logical = [&](int64_t e, int64_t d, int64_t p, int64_t f) {
      return w.get(e * strides[0] + d * strides[1] + p * p_stride + f * f_stride);
    };
    std::vector<uint8_t> want_q(static_cast<size_t>(w.size())), want_transposed(want_q.size());
    std::vector<float> want_scales(static_cast<size_t>(w.size() / kBlock / kBlock));
    for (int64_t e = 0; e < E; ++e) {
      for (int64_t p = 0; p < P; ++p) {
        std::vector<float> matrix;
        for (int64_t i = 0; i < D * F; ++i) matrix.push_back(logical(e, i / F, p, i % F));
        const QuantizedMatrix one = quantize(matrix, F, kBlock, kind);
        for (int64_t i = 0; i < D * F; ++i) {
          const uint8_t q = one.q[static_cast<size_t>(i)];
          want_q[static_cast<size_t>(((e * D + i / F) * P + p) * F + i % F)] = q;
          want_transposed[static_cast<size_t>(((e * P + p) * F + i % F) * D + i / F)] = q;
        }
        for (int64_t i = 0; i < D / kBlock * (F / kBlock); ++i) {
          const int64_t d = i / (F / kBlock);
          want_scales[static_cast<size_t>(((e * (D / kBlock) + d) * P + p) * (F / kBlock) + i % (F / kBlock))] =
              one.scales[static_cast<size_t>(i)];
        }
      }
    }
    const bool has_parts = order.P > 0;
    const Bytes q = e4m3(shape);
    const Bytes transposed = e4m3(has_parts ? std::vector<int64_t>{E, P, F, D} : std::vector<int64_t>{E, F, D});
    const Floats scales(has_parts ? std::vector<int64_t>{E, D / kBlock, P, F / kBlock}
                                  : std::vector<int64_t>{E, D / kBlock, F / kBlock});
    ab_tensor view = *w.view();
    view.strides = strides;
    ab_quantize_weights_args args{sizeof(args), kind, &view, q.view(), transposed.view(), scales.view()};
    EXPECT_OK(call(ab_quantize_weights, ab_quantize_weights_workspace, args));
    EXPECT_EQ(q.values(), want_q) << dtype;
    EXPECT_EQ(transposed.values(), want_transposed) << dtype;
    EXPECT_TRUE(same_bits(scales.values(), want_scales)) << dtype;

    const Bytes alone = e4m3(shape);
    args.q = alone.view();
    args.q_transposed = nullptr;
    EXPECT_OK(call(ab_quantize_weights, ab_quantize_weights_workspace, args, 3));
    EXPECT_EQ(alone.values(), want_q) << "q alone, on three threads";
  }
}

TEST(Quantize, AcceptsEmptySizes) {
  for (const auto& [R, D] : {std::pair{0, 128}, std::pair{3, 0}}) {
    const Floats x({R, D}), scales({R, D / kBlock});
    const Bytes q = e4m3({R, D});
    const ab_quantize_rows_args args{sizeof(args), 0, x.view(), q.view(), scales.view()};
    EXPECT_OK(call(ab_quantize_rows, ab_quantize_rows_workspace, args));
  }
  for (const auto& [E, D, F] : {std::tuple{0, 128, 128}, std::tuple{2, 0, 128}, std::tuple{2, 128, 0}}) {
    const Floats w({E, D, F}), scales({E, D / kBlock, F / kBlock});
    const Bytes q = e4m3({E, D, F});
    const ab_quantize_weights_args args{sizeof(args), 0, w.view(), q.view(), nullptr, scales.view()};
    EXPECT_OK(call(ab_quantize_weights, ab_quantize_weights_workspace, args));
  }
}

TEST(Quantize, RefusesBadArguments) {
  const Floats x({4, 256}), scales({4, 2}), narrow({4, 100}), odd({1, 1});
  const Bytes q = e4m3({4, 256});
  const Bytes unsigned_bytes({4, 256});
  const auto rows_refused = [&](auto change, const char* text) {
    ab_quantize_rows_args args{sizeof(args), 0, x.view(), q.view(), scales.view()};
    change(args);
    EXPECT_REFUSED(call(ab_quantize_rows, ab_quantize_rows_workspace, args), AB_INVALID_ARGUMENT, text);
    EXPECT_REFUSED(ab_quantize_rows(&args, nullptr), AB_INVALID_ARGUMENT, text);
  };
  rows_refused([](auto& args) { args.size = 8; }, "ab_quantize_rows_args: got size 8");
  rows_refused([](auto& args) { args.fp8_scales = 2; }, "fp8_scales: got 2, expected 0 or 1, an ab_fp8_scales");
  rows_refused([](auto& args) { args.x = nullptr; }, "x: got NULL, expected float16 or bfloat16 or float32 [R, D]");
  rows_refused([&](auto& args) { args.x = q.view(); }, "x: got float8_e4m3 (9) [4, 256], expected");
  rows_refused([&](auto& args) { args.x = narrow.view(); }, "x: got D=100, expected a multiple of 128");
  rows_refused([&](auto& args) { args.q = unsigned_bytes.view(); },
               "q: got uint8 (2) [4, 256], expected float8_e4m3 [R=4, D=256]");
  rows_refused([](auto& args) { args.q = nullptr; }, "q: got NULL, expected float8_e4m3");
  rows_refused([&](auto& args) { args.scales = odd.view(); }, "scales: got float32 (8) [1, 1], expected float32");
  rows_refused([](auto& args) { args.scales = nullptr; }, "scales: got NULL, expected float32 [R=4, D/128=2]");

  const Floats w({2, 128, 2, 256}), w_scales({2, 1, 2, 2}), tall({2, 130, 256}), wide({2, 128, 1, 200});
  const Bytes w_q = e4m3({2, 128, 2, 256});
  const Bytes w_t = e4m3({2, 2, 256, 128});
  const auto weights_refused = [&](auto change, const char* text) {
    ab_quantize_weights_args args{sizeof(args), 0, w.view(), w_q.view(), w_t.view(), w_scales.view()};
    change(args);
    EXPECT_REFUSED(call(ab_quantize_weights, ab_quantize_weights_workspace, args), AB_INVALID_ARGUMENT, text);
    EXPECT_REFUSED(ab_quantize_weights(&args, nullptr), AB_INVALID_ARGUMENT, text);
  };
  weights_refused([](auto& args) { args.fp8_scales = -1; }, "fp8_scales: got -1, expected 0 or 1");
  weights_refused([](auto& args) { args.w = nullptr; }, "w: got NULL, expected");
  weights_refused([&](auto& args) { args.w = x.view(); }, "w: got float32 (8) [4, 256], expected");
  weights_refused([&](auto& args) { args.w = tall.view(); }, "w: got D=130, expected a multiple of 128");
  weights_refused([&](auto& args) { args.w = wide.view(); }, "w: got F=200, expected a multiple of 128");
  weights_refused([](auto& args) { args.q = args.q_transposed = nullptr; },
                  "q: got NULL, expected a tensor, or one for q_transposed");
  weights_refused([&](auto& args) { args.q = w_t.view(); }, "q: got float8_e4m3 (9) [2, 2, 256, 128], expected");
  weights_refused([&](auto& args) { args.q_transposed = w_q.view(); },
                  "q_transposed: got float8_e4m3 (9) [2, 128, 2, 256], expected float8_e4m3 [E=2, P=2, F=256, D=128]");
  weights_refused([&](auto& args) { args.scales = scales.view(); }, "scales: got float32 (8) [4, 2], expected");
  EXPECT_REFUSED(ab_quantize_rows(nullptr, nullptr), AB_INVALID_ARGUMENT, "got NULL");
  EXPECT_REFUSED(ab_quantize_weights(nullptr, nullptr), AB_INVALID_ARGUMENT, "got NULL");
}

}  // namespace
}  // namespace anabranch::testing
