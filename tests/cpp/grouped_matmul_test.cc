// Grouped GEMMs and their gradients.
#include <algorithm>
#include <cmath>
#include <string>

#include "experts_operands.h"
#include "grouped_matmul_args.h"

namespace anabranch::testing {
namespace {

ab_status grouped_matmul(const Floats& x, const Floats& w, const Ints& sizes, const Floats& y, bool transpose,
                         int32_t precision = AB_PRECISION_HIGHEST) {
  const ab_grouped_matmul_args args =
      grouped_matmul_args(x.view(), w.view(), sizes.view(), y.view(), transpose ? 1 : 0, precision);
  return call(ab_grouped_matmul, ab_grouped_matmul_workspace, args);
}

template <class T>
ab_status grouped_matmul_dw(const Tensor<T>& x, const Tensor<T>& d_y, const Ints& sizes, const Floats& d_w,
                            int32_t accumulate = 0, int32_t precision = AB_PRECISION_HIGHEST) {
  const ab_grouped_matmul_dw_args args{sizeof(args), accumulate, x.view(),  d_y.view(),
                                       sizes.view(), d_w.view(), precision, 0};
  return call(ab_grouped_matmul_dw, ab_grouped_matmul_dw_workspace, args);
}

void check_grouped(const std::vector<int32_t>& group_sizes, int64_t R, int64_t D, int64_t N, bool transpose) {
  const auto E = static_cast<int64_t>(group_sizes.size());
  const Floats x = random({R, D}, 1);
  const Floats w = random(transpose ? std::vector<int64_t>{E, N, D} : std::vector<int64_t>{E, D, N}, 2);
  const Floats d_y = random({R, N}, 3);
  const Ints sizes({E}, group_sizes);
  const std::vector<int64_t> offsets = offsets_of(group_sizes, R);
  std::vector<double> y(static_cast<size_t>(R * N), 0.0);
  std::vector<double> d_w(static_cast<size_t>(E * D * N), 0.0);
  for (int64_t e = 0; e < E; ++e) {
    for (int64_t r = offsets[static_cast<size_t>(e)]; r < offsets[static_cast<size_t>(e) + 1]; ++r) {
      for (int64_t d = 0; d < D; ++d) {
        for (int64_t n = 0; n < N; ++n) {
          const float weight = transpose ? w[(e * N + n) * D + d] : w[(e * D + d) * N + n];
          y[static_cast<size_t>(r * N + n)] += static_cast<double>(x[r * D + d]) * weight;
          d_w[static_cast<size_t>((e * D + d) * N + n)] += static_cast<double>(x[r * D + d]) * d_y[r * N + n];
        }
      }
    }
  }
  Floats got({R, N});
  EXPECT_OK(grouped_matmul(x, w, sizes, got, transpose));
  expect_near(got, y, 1e-6, "y");
  Floats gradient({E, D, N});
  EXPECT_OK(grouped_matmul_dw(x, d_y, sizes, gradient));
  expect_near(gradient, d_w, 1e-6, "d_w");
}

TEST(GroupedMatmul, IsOneGemmPerExpert) {
  for (const bool transpose : {false, true}) {
    check_grouped({3, 0, 5, 1}, 9, 7, 5, transpose);
    check_grouped({3, 0, 5, 1}, 12, 7, 5, transpose);
    check_grouped({300, 1, 17}, 320, 33, 40, transpose);
    check_grouped({40}, 40, 600, 530, transpose);
    check_grouped({20, 20}, 40, 8, 1024, transpose);  // the row stride of w is a whole page
    check_grouped({0, 0}, 4, 3, 2, transpose);
    check_grouped({2}, 0, 3, 2, transpose);
  }
}

// The CPU computes in full precision even if a lower one is allowed.
TEST(GroupedMatmul, EveryPrecisionHasTheSameBits) {
  const Floats x = random({40, 33}, 1), w = random({2, 33, 20}, 2), d_y = random({40, 20}, 3);
  const Ints sizes({2}, {30, 10});
  const Floats y({40, 20}), rounded_y({40, 20}), d_w({2, 33, 20}), rounded_d_w({2, 33, 20});
  EXPECT_OK(grouped_matmul(x, w, sizes, y, false));
  EXPECT_OK(grouped_matmul(x, w, sizes, rounded_y, false, AB_PRECISION_TF32));
  EXPECT_EQ(rounded_y.values(), y.values());
  EXPECT_OK(grouped_matmul_dw(x, d_y, sizes, d_w));
  EXPECT_OK(grouped_matmul_dw(x, d_y, sizes, rounded_d_w, 0, AB_PRECISION_TF32));
  EXPECT_EQ(rounded_d_w.values(), d_w.values());
}

TEST(GroupedMatmul, GroupSizesAreClippedToTheRows) {
  for (const bool transpose : {false, true}) {
    check_grouped({-5, 3, INT32_MIN, 4, -1}, 6, 5, 3, transpose);
    check_grouped({2, INT32_MAX, INT32_MAX, 1}, 7, 5, 3, transpose);
    check_grouped({INT32_MAX, -1, INT32_MAX}, 300, 5, 3, transpose);
  }
}

template <class T>
void expect_accumulation(const Tensor<T>& x, const Tensor<T>& d_y, const std::vector<int32_t>& group_sizes) {
  const std::vector<int64_t> shape = {static_cast<int64_t>(group_sizes.size()), x.view()->shape[1],
                                      d_y.view()->shape[1]};
  const Ints sizes({shape[0]}, group_sizes);
  const Floats gradient(shape);
  EXPECT_OK(grouped_matmul_dw(x, d_y, sizes, gradient));
  const Floats before = random(shape, 9);
  const Floats sum = random(shape, 9);
  EXPECT_OK(grouped_matmul_dw(x, d_y, sizes, sum, 1));
  expect_accumulated(sum, before, gradient);
}

TEST(GroupedMatmul, GradientsAccumulate) {
  const std::vector<int32_t> sizes = {30, 0, 1500, 1, 0};  // sums longer than a k-block; experts without rows
  expect_accumulation(random({1540, 20}, 1), random({1540, 530}, 2), sizes);
  expect_accumulation(random_bf16({1540, 20}, 1), random_bf16({1540, 530}, 2), sizes);
}

// A large workspace costs page faults in every call.
TEST(GroupedMatmul, SmallGemmsNeedLittleMemory) {
  const Floats x({32, 64}), w({2, 64, 64}), y({32, 64});
  const Ints sizes({2}, {16, 16});
  const ab_grouped_matmul_args args = grouped_matmul_args(x.view(), w.view(), sizes.view(), y.view());
  const ab_exec exec{sizeof(ab_exec), 1, nullptr, nullptr, 0};
  size_t bytes = 0;
  EXPECT_OK(ab_grouped_matmul_workspace(&args, &exec, &bytes));
  EXPECT_LT(bytes, size_t{64} << 10);
}

TEST(GroupedMatmul, RefusesBadArguments) {
  const Floats x = random({4, 3}, 1);
  const Floats w = random({2, 3, 5}, 2);
  const Ints sizes({2}, {2, 2});
  const Floats y({4, 5});
  EXPECT_OK(grouped_matmul(x, w, sizes, y, false));
  EXPECT_REFUSED(grouped_matmul(x, w, sizes, y, true), AB_INVALID_ARGUMENT,
                 "w: got float32 (8) [2, 3, 5], expected float32 [E=2, N, D=3]");
  EXPECT_REFUSED(grouped_matmul(x, w, Ints({3}, {1, 1, 1}), y, false), AB_INVALID_ARGUMENT,
                 "w: got float32 (8) [2, 3, 5], expected float32 [E=3, D=3, N]");
  EXPECT_REFUSED(grouped_matmul(x, w, sizes, Floats({4, 4}), false), AB_INVALID_ARGUMENT,
                 "y: got float32 (8) [4, 4], expected float32 [R=4, N=5]");
  EXPECT_REFUSED(ab_grouped_matmul(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_grouped_matmul_args: got NULL");
  EXPECT_REFUSED(ab_grouped_matmul_dw(nullptr, nullptr), AB_INVALID_ARGUMENT, "ab_grouped_matmul_dw_args: got NULL");
  ab_grouped_matmul_dw_args unknown_option{};
  unknown_option.size = sizeof(unknown_option);
  unknown_option.reserved = 3;
  EXPECT_REFUSED(ab_grouped_matmul_dw(&unknown_option, nullptr), AB_INVALID_ARGUMENT, "reserved: got 3, expected 0");
  ab_grouped_matmul_args args = grouped_matmul_args(x.view(), w.view(), sizes.view(), y.view(), 2);
  EXPECT_REFUSED(ab_grouped_matmul(&args, nullptr), AB_INVALID_ARGUMENT, "transpose_w: got 2, expected 0 or 1");
  args.transpose_w = 0;
  EXPECT_REFUSED(ab_grouped_matmul(&args, nullptr), AB_INVALID_ARGUMENT, "workspace: got 0 bytes");
  args.size = 8;
  EXPECT_REFUSED(ab_grouped_matmul(&args, nullptr), AB_INVALID_ARGUMENT, "ab_grouped_matmul_args: got size 8");
  EXPECT_REFUSED(grouped_matmul_dw(x, Floats({3, 5}), sizes, Floats({2, 3, 5})), AB_INVALID_ARGUMENT,
                 "d_y: got float32 (8) [3, 5], expected");
  EXPECT_REFUSED(grouped_matmul_dw(x, Floats({4, 5}), sizes, Floats({2, 5, 3})), AB_INVALID_ARGUMENT,
                 "d_w: got float32 (8) [2, 5, 3], expected");
  EXPECT_REFUSED(grouped_matmul_dw(x, Floats({4, 5}), sizes, Floats({2, 3, 5}), -1), AB_INVALID_ARGUMENT,
                 "accumulate: got -1, expected 0 or 1");
  for (const int32_t precision : {-1, 3}) {
    const std::string got = "precision: got " + std::to_string(precision);
    EXPECT_REFUSED(grouped_matmul(x, w, sizes, y, false, precision), AB_INVALID_ARGUMENT,
                   (got + ", expected 0 to 2, an ab_precision").c_str());
    EXPECT_REFUSED(grouped_matmul_dw(x, Floats({4, 5}), sizes, Floats({2, 3, 5}), 0, precision), AB_INVALID_ARGUMENT,
                   (got + ", expected 0 or 1, an ab_precision that weight gradients support").c_str());
  }
  EXPECT_REFUSED(grouped_matmul_dw(x, Floats({4, 5}), sizes, Floats({2, 3, 5}), 0, AB_PRECISION_FP8),
                 AB_INVALID_ARGUMENT, "precision: got 2, expected 0 or 1");
}

}  // namespace
}  // namespace anabranch::testing
