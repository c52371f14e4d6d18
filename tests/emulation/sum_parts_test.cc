// Sums of the parts of a thin GEMM.
#include "experts/cuda/sum_parts.h"

#include <cmath>
#include <limits>

#include "experts_case.h"

namespace anabranch::testing {
namespace {

void check(int32_t dtype, int64_t count) {
  SCOPED_TRACE(::testing::Message() << "dtype " << dtype << ", " << count << " parts");
  constexpr int64_t R = 37, N = 8, kRows = 30;  // rows of all groups
  const Tensor<int32_t> sizes({3}, {12, -5, 18});
  std::vector<int32_t> slots(R);
  for (int32_t row = 0; row < R; ++row) slots[static_cast<size_t>(row)] = row % 7 == 3 ? -1 : row;
  const Tensor<int32_t> slot_of_row({R}, slots);
  FloatTensor parts({count, R, N}, AB_FLOAT32);
  parts.fill_uniform(3);
  for (int64_t i = 0; i < parts.size(); ++i) {
    const int64_t row = i / N % R;
    if (row >= kRows || row % 7 == 3) parts.set(i, std::numeric_limits<float>::quiet_NaN());
  }
  FloatTensor y({R, N}, dtype), want({R, N}, dtype);
  cuda::RowsProduct product{.group_sizes = static_cast<const int32_t*>(sizes.view()->data),
                            .y = y.view()->data,
                            .map = cuda::RowMap(slot_of_row.view(), R, 1, R),
                            .dtype = dtype,
                            .R = R,
                            .E = 3,
                            .N = N,
                            .factor = -0.75f};
  EXPECT_OK(cuda::sum_parts(product, static_cast<const float*>(parts.view()->data), count, 4, nullptr));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int64_t i = 0; i < R * N; ++i) {
    const int64_t row = i / N;
    float sum = 0;
    for (int64_t part = 0; part < count; ++part) sum += parts.get(part * R * N + i);
    want.set(i, row >= kRows || row % 7 == 3 ? 0.0f : -0.75f * sum);
  }
  EXPECT_TRUE(y.is(want));
}

TEST(SumOfParts, IsInOrderAndZeroInPadding) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    for (const int64_t count : {1, 2, 7}) check(dtype, count);
  }
}

}  // namespace
}  // namespace anabranch::testing
