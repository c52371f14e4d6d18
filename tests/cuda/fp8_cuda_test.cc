// FP8 quantisation on CUDA against the CPU, bit for bit. fp8_products_cuda_test.cc tests GEMMs of quantised operands.
#include <cmath>
#include <functional>
#include <limits>

#include "anabranch/cuda.h"
#include "device.h"
#include "experts/cuda/fp8_operands.h"
#include "float_tensor.h"
#include "quantized.h"

namespace anabranch::testing {
namespace {

class Fp8Cuda : public CudaTest {};

constexpr int32_t kKinds[] = {AB_FP8_SCALES_FLOAT32, AB_FP8_SCALES_POWER_OF_TWO};
constexpr int32_t kDtypes[] = {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16};

// Fills x with normal random numbers and every 13th block of 128 with one special kind of block.
void fill(FloatTensor& x) {
  x.fill_normal(3);
  const std::function<float(int64_t)> of[] = {
      [](int64_t) { return 0.0f; },
      [](int64_t j) { return j % 2 == 0 ? -0.0f : 0.0f; },
      [](int64_t j) { return j == 77 ? 1e4f : 0.01f * static_cast<float>(j); },
      [](int64_t j) { return j == 5 ? -std::numeric_limits<float>::infinity() : 1.0f; },
      [](int64_t j) { return j == 127 ? NAN : 1.0f; },
      [](int64_t j) { return std::ldexp(static_cast<float>(j - 64), -149); },
      [](int64_t j) { return std::ldexp(static_cast<float>(j), -125); },
      [](int64_t j) { return std::ldexp(static_cast<float>(7 * j % 449), -10); },
  };
  for (int64_t run = 0; run < x.size() / kBlock; run += 13) {
    const auto& value = of[run / 13 % 8];
    for (int64_t j = 0; j < kBlock; ++j) x.set(run * kBlock + j, value(j));
  }
}

TEST_F(Fp8Cuda, RowsHaveTheCpusBits) {
  for (const int32_t dtype : kDtypes) {
    for (const int32_t kind : kKinds) {
      for (const int64_t D : {128, 384, 2048}) {
        for (const int64_t shift : {0, 4}) {
          const int64_t R = 131;
          FloatTensor x({R, D}, dtype);
          fill(x);
          const Bytes want = e4m3({R, D}), got = e4m3({R, D});
          const Tensor<float> want_scales({R, D / kBlock}), got_scales({R, D / kBlock});
          ab_quantize_rows_args args{sizeof(args), kind, x.view(), want.view(), want_scales.view()};
          EXPECT_OK(call(ab_quantize_rows, ab_quantize_rows_workspace, args));
          Mirrors mirrors;
          args.x = mirrors.add(x.view(), shift);
          args.q = mirrors.add(got.view(), shift);
          args.scales = mirrors.add(got_scales.view(), shift);
          EXPECT_OK(ab_cuda_quantize_rows(&args, nullptr));
          mirrors.fetch();
          EXPECT_EQ(got.values(), want.values()) << dtype << " " << kind << " " << D << " " << shift;
          EXPECT_TRUE(same_bits(got_scales.values(), want_scales.values())) << dtype << " " << kind << " " << D;
        }
      }
    }
  }
}

// Quantises weights [E, D, P, F] in every memory order.
TEST_F(Fp8Cuda, WeightsHaveTheCpusBitsInEveryOrder) {
  constexpr int64_t E = 2, D = 256, P = 2, F = 384;
  const int64_t sizes[] = {E, D, P, F};
  const std::vector<int> orders[] = {{0, 1, 2, 3}, {0, 2, 3, 1}, {0, 1, 3, 2}, {0, 3, 2, 1}};
  for (size_t i = 0; i < std::size(orders); ++i) {
    for (const int32_t dtype : kDtypes) {
      FloatTensor w({E, D, P, F}, dtype);
      fill(w);
      int64_t strides[4];
      int64_t stride = 1;
      for (size_t axis = 4; axis-- > 0; stride *= sizes[orders[i][axis]]) strides[orders[i][axis]] = stride;
      ab_tensor view = *w.view();
      view.strides = strides;
      const Bytes want = e4m3({E, D, P, F}), got = e4m3({E, D, P, F});
      const Bytes want_transposed = e4m3({E, P, F, D}), got_transposed = e4m3({E, P, F, D});
      const Tensor<float> want_scales({E, D / kBlock, P, F / kBlock}), got_scales({E, D / kBlock, P, F / kBlock});
      const int32_t kind = kKinds[i % 2];
      ab_quantize_weights_args args{sizeof(args), kind, &view, want.view(), want_transposed.view(), want_scales.view()};
      EXPECT_OK(call(ab_quantize_weights, ab_quantize_weights_workspace, args));
      const int64_t shift = dtype == AB_FLOAT32 && i % 2 == 0 ? 4 : 0;
      Mirrors mirrors;
      ab_tensor on_device = *mirrors.add(w.view(), shift);
      on_device.strides = strides;
      args.w = &on_device;
      args.q = i == 2 ? nullptr : mirrors.add(got.view());
      args.q_transposed = i == 1 ? nullptr : mirrors.add(got_transposed.view());
      args.scales = mirrors.add(got_scales.view());
      EXPECT_OK(ab_cuda_quantize_weights(&args, nullptr));
      mirrors.fetch();
      EXPECT_TRUE(args.q == nullptr || got.values() == want.values()) << i << " " << dtype;
      EXPECT_TRUE(args.q_transposed == nullptr || got_transposed.values() == want_transposed.values()) << i;
      EXPECT_TRUE(same_bits(got_scales.values(), want_scales.values())) << i << " " << dtype;
    }
  }
}

TEST_F(Fp8Cuda, AcceptsEmptySizes) {
  for (const auto& [R, D] : {std::pair{0, 128}, std::pair{3, 0}}) {
    const Tensor<float> x({R, D}), scales({R, D / kBlock});
    const Bytes q = e4m3({R, D});
    const ab_quantize_rows_args args{sizeof(args), 0, x.view(), q.view(), scales.view()};
    EXPECT_OK(ab_cuda_quantize_rows(&args, nullptr));
  }
  const Tensor<float> w({2, 0, 128}), scales({2, 0, 1});
  const Bytes q = e4m3({2, 0, 128});
  const ab_quantize_weights_args args{sizeof(args), 0, w.view(), q.view(), nullptr, scales.view()};
  EXPECT_OK(ab_cuda_quantize_weights(&args, nullptr));
}

// A view that starts at a later column has fewer scales and ends at the last one.
TEST(Fp8WeightOperand, LaterColumnsEndAtTheLastScale) {
  const QuantizedSizes sizes{0, 3, 256, 2, 640};
  const Bytes q = e4m3({3, 2, 640, 256});
  const Tensor<float> scales({3, 2, 2, 5});
  for (const bool transposed : {false, true}) {
    Workspace none(nullptr);
    const cuda::Fp8WeightOperand operand(none, nullptr, q.view(), scales.view(), sizes, transposed, false);
    const int64_t k = transposed ? 2 * 640 : 256;
    for (const int64_t first : {0, 128}) {
      const cuda::Fp8Weights from = operand.weights_from(first, k);
      EXPECT_EQ(from.values, q.values().data() + first * k);
      EXPECT_EQ(from.scales, scales.values().data() + first / kBlock * (transposed ? 10 : 1));
      EXPECT_EQ(from.scales + from.count, scales.values().data() + scales.size()) << transposed << " " << first;
    }
  }
}

}  // namespace
}  // namespace anabranch::testing
