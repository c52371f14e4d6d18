// Sums of rows by token at several places against the sums of combine, bit for bit.
#include "dispatch/sum_tokens.h"

#include <random>

#include "dispatch/combine.h"
#include "experts_case.h"

namespace anabranch::testing {
namespace {

constexpr int64_t kPlaces = 3;

// Slots have a row with this probability; each row has one slot.
void check(int64_t T, int64_t K, int64_t N, int32_t rows_dtype, int32_t sums_dtype, double density, bool weighted) {
  SCOPED_TRACE(::testing::Message() << "T " << T << ", K " << K << ", N " << N << ", density " << density);
  const int64_t all = kPlaces * T;
  std::mt19937 random(5);
  Tensor<int32_t> row_of_slot({all, K});
  int32_t R = 0;
  for (int64_t slot = 0; slot < all * K; ++slot) {
    row_of_slot[slot] = std::bernoulli_distribution(density)(random) ? R++ : -1;
  }
  if (all * K > 5) row_of_slot[5] = R;  // outside
  FloatTensor rows({R, N}, rows_dtype), weights({all, K}, AB_FLOAT32);
  rows.fill_normal(1);
  weights.fill_normal(2);
  FloatTensor want({all, N}, sums_dtype), got({all, N}, sums_dtype);
  GatherSum sum;
  sum.maps = {all, K, R, static_cast<int32_t*>(row_of_slot.view()->data), nullptr};
  sum.rows = Rows(rows.view());
  if (weighted) sum.weights = Floats(weights.view());
  sum.out = Rows(want.view());
  EXPECT_OK(cuda::compute_sum(sum, nullptr));
  cuda::Places places{{}, T, kPlaces};
  for (int64_t p = 0; p < kPlaces; ++p) {
    const int64_t reversed = kPlaces - 1 - p;  // places are in any order
    places.data[p] = static_cast<char*>(got.view()->data) + reversed * T * N * 2;
  }
  EXPECT_OK(cuda::compute_token_sums(sum, places, nullptr));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int64_t i = 0; i < all * N; ++i) {
    const int64_t p = i / (T * N);
    ASSERT_EQ(got.get((kPlaces - 1 - 2 * p) * T * N + i), want.get(i)) << i;
  }
}

TEST(SumsOfTokens, HaveTheBitsOfCombine) {
  for (const int64_t K : {1, 3, 8, 20, 32}) {
    for (const double density : {0.0, 0.3, 1.0}) check(29, K, 72, AB_BFLOAT16, AB_BFLOAT16, density, K != 8);
  }
  check(7, 4, 1096, AB_FLOAT16, AB_BFLOAT16, 0.5, true);
  check(1, 2, 8, AB_BFLOAT16, AB_FLOAT16, 0.7, false);
}

TEST(SumsOfTokens, FitUpTo32SlotsOf16Bits) {
  EXPECT_TRUE(cuda::fits_token_sums(32, 8, AB_BFLOAT16, AB_FLOAT16));
  EXPECT_FALSE(cuda::fits_token_sums(33, 8, AB_BFLOAT16, AB_BFLOAT16));
  EXPECT_FALSE(cuda::fits_token_sums(0, 8, AB_BFLOAT16, AB_BFLOAT16));
  EXPECT_FALSE(cuda::fits_token_sums(2, 12, AB_BFLOAT16, AB_BFLOAT16));
  EXPECT_FALSE(cuda::fits_token_sums(2, 8, AB_FLOAT32, AB_BFLOAT16));
  EXPECT_FALSE(cuda::fits_token_sums(2, 8, AB_BFLOAT16, AB_FLOAT32));
}

}  // namespace
}  // namespace anabranch::testing
