// The addend of combine: out = sum of rows + addend.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "dispatch_operands.h"
#include "float_tensor.h"

namespace anabranch::testing {
namespace {

// A combine with an addend. Some tokens have no rows, and some assignments were dropped.
struct SumWithAddend {
  static constexpr int64_t kSlots = 3;

  Tensor<int32_t> row_of_slot;
  Tensor<float> weights;
  FloatTensor rows, addend, out;

  SumWithAddend(int64_t T, int64_t D, int32_t rows_dtype, int32_t addend_dtype, int32_t out_dtype)
      : row_of_slot({T, kSlots}, some_rows(T, 4)),
        weights({T, kSlots}, normal(T * kSlots, 1)),
        rows({2 * T, D}, rows_dtype),
        addend({T, D}, addend_dtype),
        out({T, D}, out_dtype) {
    rows.fill_normal(2);
    addend.fill_normal(3);
  }
  // Assigns 2 T rows in random order to 3 T slots. The first two tokens get no row.
  static std::vector<int32_t> some_rows(int64_t T, uint32_t seed) {
    std::vector<int32_t> slots(static_cast<size_t>(T * kSlots), -1);
    const auto first = slots.begin() + 2 * kSlots;
    const auto count = static_cast<int32_t>(std::min<int64_t>(2 * T, slots.end() - first));
    std::iota(first, first + count, 0);
    std::shuffle(first, slots.end(), std::mt19937(seed));
    return slots;
  }
  ab_combine_args args(bool weighted) const {
    return {sizeof(ab_combine_args),
            rows.view(),
            row_of_slot.view(),
            weighted ? weights.view() : nullptr,
            out.view(),
            addend.view()};
  }
};

// Checks each element against the sum in float64. The bound allows the float32 roundings of the terms and one rounding
// to the dtype of out.
void expect_is_the_sum(const SumWithAddend& sum, bool weighted) {
  const int64_t D = sum.rows.view()->shape[1];
  for (int64_t i = 0; i < sum.out.size(); ++i) {
    double want = double{sum.addend.get(i)};
    double size = std::abs(want);
    for (int64_t slot = i / D * SumWithAddend::kSlots; slot < (i / D + 1) * SumWithAddend::kSlots; ++slot) {
      const int32_t row = sum.row_of_slot[slot];
      if (row < 0) continue;
      const double term = (weighted ? double{sum.weights[slot]} : 1.0) * double{sum.rows.get(row * D + i % D)};
      want += term;
      size += std::abs(term);
    }
    const double in_float32 = (SumWithAddend::kSlots + 2) * rounding_of(AB_FLOAT32) * size;
    const double once = rounding_of(sum.out.dtype()) * (std::abs(want) + in_float32);
    const double denormal = 0x1p-25;  // half the spacing of float16 denormals
    ASSERT_NEAR(double{sum.out.get(i)}, want, in_float32 + once + denormal) << "token " << i / D << " column " << i % D;
  }
}

TEST(CombineAddend, MayHaveEveryDtype) {
  for (const int32_t rows_dtype : kFloatDtypes) {
    for (const int32_t addend_dtype : kFloatDtypes) {
      for (const int32_t out_dtype : kFloatDtypes) {
        for (const int64_t D : {1, 37, 64, 513, 1100}) {
          for (const bool weighted : {false, true}) {
            SCOPED_TRACE(::testing::Message() << "rows " << rows_dtype << " addend " << addend_dtype << " out "
                                              << out_dtype << " D " << D << " weighted " << weighted);
            const SumWithAddend sum(20, D, rows_dtype, addend_dtype, out_dtype);
            EXPECT_OK(call(ab_combine, ab_combine_workspace, sum.args(weighted)));
            expect_is_the_sum(sum, weighted);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(CombineAddend, ComesAfterTheRowsAndBeforeTheOneRounding) {
  const Tensor<int32_t> row_of_slot({1, 2}, {0, 1});
  const auto combined = [&](const std::vector<float>& rows, float addend, auto* out) {
    const Tensor<float> two_rows({2, 1}, rows);
    const Tensor<float> one({1, 1}, std::vector<float>{addend});
    const ab_combine_args args{sizeof(args), two_rows.view(), row_of_slot.view(), nullptr, out->view(), one.view()};
    EXPECT_OK(call(ab_combine, ab_combine_workspace, args));
    return (*out)[0];
  };
  // 1 + 2^24 rounds to 2^24 in float32, so an addend that is added before or between the rows would be lost.
  Tensor<float> float32_out({1, 1});
  EXPECT_EQ(combined({0x1p24f, -0x1p24f}, 1.0f, &float32_out), 1.0f);
  // bfloat16 has a spacing of 2^-7 above 1. If the sum of the rows were rounded first, the result would stay 1.
  Tensor<uint16_t> bfloat16_out({1, 1}, AB_BFLOAT16);
  EXPECT_EQ(combined({1.0f, 0x1p-8f}, 0x1p-9f, &bfloat16_out), from_float<BFloat16>(1.0f + 0x1p-7f).bits);
}

TEST(CombineAddend, MayBeTheResult) {
  for (const int32_t dtype : kFloatDtypes) {
    SCOPED_TRACE(::testing::Message() << "dtype " << dtype);
    SumWithAddend sum(1200, 650, AB_BFLOAT16, dtype, dtype);  // large enough for threads
    ab_combine_args args = sum.args(true);
    EXPECT_OK(call(ab_combine, ab_combine_workspace, args, 1));
    expect_is_the_sum(sum, true);
    args.out = sum.addend.view();
    EXPECT_OK(call(ab_combine, ab_combine_workspace, args, 3));
    EXPECT_TRUE(sum.addend.is(sum.out));
  }
}

}  // namespace
}  // namespace anabranch::testing
