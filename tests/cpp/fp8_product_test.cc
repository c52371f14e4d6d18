// Grouped GEMMs in FP8 against float64 GEMMs of the dequantised operands.
#include "fp8_operands.h"
#include "grouped_matmul_args.h"

namespace anabranch::testing {
namespace {

struct Gemm {
  static constexpr int64_t R = 45, D = 256, N = 384;
  Floats x = random({R, D}, 1);
  Floats w;
  Ints sizes{{4}, {13, 0, 30, 1}};  // one row past the groups
  int32_t transpose_w, kind;

  Gemm(bool transpose, int32_t fp8_scales)
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
          matmul(std::span(rows).subspan(static_cast<size_t>(offsets[e_] * D)), matrix, count, D, N);
      std::copy(part.begin(), part.end(), y.begin() + offsets[e_] * N);
    }
    return y;
  }
};

TEST(Fp8, AGemmMatchesDequantisedOperands) {
  for (const bool transpose : {false, true}) {
    for (const int32_t kind : {AB_FP8_SCALES_FLOAT32, AB_FP8_SCALES_POWER_OF_TWO}) {
      const Gemm op(transpose, kind);
      const Floats y({Gemm::R, Gemm::N});
      EXPECT_OK(Gemm::run(op.args(y.view())));
      expect_parts_near(y, op.want(), Gemm::R, "y");

      // Passing quantised operands or changing the thread count does not change the bits.
      const QuantizedTensor x(op.x.view(), kind);
      const QuantizedWeights w(op.w.view(), kind);
      for (int given = 0; given < 4; ++given) {
        const Floats same({Gemm::R, Gemm::N});
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
        EXPECT_OK(Gemm::run(args, 1 + given));
        EXPECT_EQ(same.values(), y.values()) << given;
      }
      const Tensor<uint16_t> narrow({Gemm::R, Gemm::N});
      ab_grouped_matmul_args args = op.args(narrow.view());
      args.x = x.q.view();
      args.x_scales = x.scales.view();
      EXPECT_OK(Gemm::run(args));
      for (int64_t i = 0; i < y.size(); ++i) ASSERT_EQ(narrow[i], from_float<BFloat16>(y[i]).bits) << i;
    }
  }
}

TEST(Fp8, NanStaysInItsRowAndColumns) {
  Gemm op(false, AB_FP8_SCALES_FLOAT32);
  const Floats clean({Gemm::R, Gemm::N}), y({Gemm::R, Gemm::N});
  EXPECT_OK(Gemm::run(op.args(clean.view())));
  op.x[14 * Gemm::D + 200] = INFINITY;
  op.x[44 * Gemm::D] = NAN;                                          // past the groups
  op.w[(2 * Gemm::D + 130) * Gemm::N + 150] = NAN;                   // expert 2, columns 128 to 255
  for (int64_t j = 0; j < Gemm::D; ++j) op.x[20 * Gemm::D + j] = 0;  // 0 * NaN is NaN
  EXPECT_OK(Gemm::run(op.args(y.view())));
  for (int64_t r = 0; r < Gemm::R; ++r) {
    for (int64_t n = 0; n < Gemm::N; ++n) {
      const int64_t i = r * Gemm::N + n;
      const bool is_nan = r == 14 || (r >= 13 && r < 43 && n >= 128 && n < 256);
      if (is_nan) {
        ASSERT_TRUE(std::isnan(y[i])) << r << " " << n;
      } else {
        ASSERT_EQ(y[i], r == 20 ? 0.0f : clean[i]) << r << " " << n;
      }
    }
  }
}

TEST(Fp8, GemmsRefuseBadArguments) {
  const Gemm op(false, AB_FP8_SCALES_FLOAT32);
  const Floats y({Gemm::R, Gemm::N}), narrow({Gemm::R, 100}), odd({1, 1});
  const Floats w_ragged({4, 256, 100});
  const QuantizedTensor x(op.x.view(), 0);
  const QuantizedWeights w(op.w.view(), 0);
  const auto refused = [&](auto change, const char* text) {
    ab_grouped_matmul_args args = op.args(y.view());
    args.w_q = w.q_transposed.view();
    args.w_scales = w.scales.view();
    change(args);
    EXPECT_REFUSED(Gemm::run(args), AB_INVALID_ARGUMENT, text);
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
          "x_scales: got a tensor, expected NULL if x is not float8_e4m3");
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

}  // namespace
}  // namespace anabranch::testing
