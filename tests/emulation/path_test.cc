// Which path operations take, and what the variable that names one does. Run once for every value of it.
#include "experts/cuda/path.h"

#include <cstdlib>
#include <string>

#include "anabranch/cuda.h"
#include "float_tensor.h"
#include "grouped_matmul_args.h"

namespace anabranch::testing {
namespace {

using cuda::Path;
using cuda::PathChoice;

constexpr cuda::Device kAmpere{108, 80};
constexpr cuda::Device kHopper{132, 90};

cuda::RowsProduct product() {
  cuda::RowsProduct product;
  product.dtype = AB_FLOAT32;
  product.R = product.E = product.D = product.N = 5;
  return product;
}

cuda::WeightGradient gradient(int32_t x, int32_t d_y) {
  cuda::WeightGradient gradient;
  gradient.x.dtype = x;
  gradient.d_y.dtype = d_y;
  gradient.d_w.dtype = AB_FLOAT32;
  gradient.R = gradient.E = gradient.D = gradient.N = 5;
  return gradient;
}

ab_status multiply_nothing() {
  const FloatTensor x({0, 3}, AB_FLOAT32), w({2, 3, 4}, AB_FLOAT32), y({0, 4}, AB_FLOAT32);
  const Tensor<int32_t> sizes({2}, {0, 0});
  const ab_grouped_matmul_args args = grouped_matmul_args(x.view(), w.view(), sizes.view(), y.view());
  return ab_cuda_grouped_matmul(&args, nullptr);
}

// What is wrong is said first.
TEST(WithoutAVariable, Fp8NeedsHopper) {
  const FloatTensor x({4, 128}, AB_BFLOAT16), w({2, 128, 128}, AB_BFLOAT16), y({4, 128}, AB_BFLOAT16);
  const Tensor<int32_t> sizes({2}, {2, 2});
  ab_grouped_matmul_args args = grouped_matmul_args(x.view(), w.view(), sizes.view(), y.view());
  args.precision = AB_PRECISION_FP8;
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_grouped_matmul_workspace(&args, nullptr, &bytes));
  std::vector<uint8_t> workspace(bytes + 64);
  ab_exec exec{sizeof(exec), 0, nullptr, workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64),
               bytes};
  EXPECT_REFUSED(ab_cuda_grouped_matmul(&args, &exec), AB_UNSUPPORTED,
                 "precision: got AB_PRECISION_FP8, expected another");
  args.x_scales = y.view();
  EXPECT_REFUSED(ab_cuda_grouped_matmul(&args, &exec), AB_INVALID_ARGUMENT, "x_scales: got");
}

TEST(WithoutAVariable, TheFirstPathThatCanIsTaken) {
  PathChoice choice = cuda::choose_path(product(), kAmpere);
  EXPECT_EQ(choice.path, Path::portable);
  EXPECT_STREQ(choice.why_not_hopper, "the compute capability is not 9.0");
  choice = cuda::choose_path(product(), kHopper);
  EXPECT_EQ(choice.path, Path::portable);
  EXPECT_STREQ(choice.why_not_hopper, "it is emulated");
  choice = cuda::choose_path(gradient(AB_FLOAT32, AB_BFLOAT16), kHopper);
  EXPECT_EQ(choice.path, Path::plain);
  EXPECT_STREQ(choice.why_not_portable, "dtypes differ");
  EXPECT_EQ(cuda::choose_path(gradient(AB_BFLOAT16, AB_BFLOAT16), kAmpere).path, Path::portable);
  cuda::RowsProduct large = product();
  large.R = int64_t{1} << 31;
  choice = cuda::choose_path(large, kAmpere);
  EXPECT_EQ(choice.path, Path::plain);
  EXPECT_STREQ(choice.why_not_portable, "2^30 rows, columns or tiles, or more");
  EXPECT_OK(multiply_nothing());
}

// Of a layer, on the emulated device of 8.0.
struct LayersPath {
  const char* path = nullptr;
  const char* why_not = nullptr;

  explicit LayersPath(int32_t dtype, int64_t T = 64, int64_t D = 32) {
    EXPECT_OK(ab_cuda_experts_path(dtype, T, 2, 8, D, 2, 48, &path, &why_not));
  }
};

TEST(WithoutAVariable, ALayerRunsOnThePathOfItsProducts) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    const LayersPath layer(dtype);
    EXPECT_STREQ(layer.path, "portable");
    EXPECT_STREQ(layer.why_not, "the compute capability is not 9.0");
  }
  EXPECT_STREQ(LayersPath(AB_BFLOAT16, 0).path, "portable");
  const LayersPath wide(AB_BFLOAT16, 64, (int64_t{1} << 30) + 1);
  EXPECT_STREQ(wide.path, "plain");
  EXPECT_STREQ(wide.why_not, "2^30 rows, columns or tiles, or more");
}

TEST(WithoutAVariable, ALayerThatIsNoneIsRefused) {
  const char* path = nullptr;
  const auto refused = [&](int32_t dtype, int64_t T, int64_t K, int64_t F, int64_t P, const char* why) {
    EXPECT_REFUSED(ab_cuda_experts_path(dtype, T, K, 8, 32, P, F, &path, nullptr), AB_INVALID_ARGUMENT, why);
  };
  refused(AB_INT32, 4, 2, 48, 2, "dtype: got ab_dtype 4, expected float16, bfloat16 or float32");
  refused(AB_FLOAT32, 4, 2, -1, 2, "F: got -1, expected 0 to 2^31 - 1");
  refused(AB_FLOAT32, 4, 2, 48, 3, "P: got 3, expected 1 or 2");
  refused(AB_FLOAT32, int64_t{1} << 30, 2, 48, 2, "T: got 1073741824 with K = 2, expected T K < 2^31");
  EXPECT_REFUSED(ab_cuda_experts_path(AB_FLOAT32, 4, 2, 8, 32, 2, 48, nullptr, nullptr), AB_INVALID_ARGUMENT,
                 "path: got NULL");
  EXPECT_OK(ab_cuda_experts_path(AB_FLOAT32, 4, 2, 8, 32, 2, 48, &path, nullptr));
}

TEST(Portable, TheVariableLeavesHopperOut) {
  const PathChoice choice = cuda::choose_path(product(), kHopper);
  EXPECT_EQ(choice.path, Path::portable);
  EXPECT_STREQ(choice.why_not_hopper, "ANABRANCH_CUDA_PATH names a later path");
  EXPECT_EQ(cuda::choose_path(gradient(AB_FLOAT32, AB_BFLOAT16), kHopper).path, Path::plain);
  EXPECT_STREQ(LayersPath(AB_BFLOAT16).why_not, "ANABRANCH_CUDA_PATH names a later path");
}

TEST(Plain, TheVariableLeavesTensorCoresOut) {
  const PathChoice choice = cuda::choose_path(product(), kHopper);
  EXPECT_EQ(choice.path, Path::plain);
  EXPECT_STREQ(choice.why_not_portable, "ANABRANCH_CUDA_PATH names a later path");
  EXPECT_STREQ(LayersPath(AB_BFLOAT16).path, "plain");
}

TEST(Unknown, AnotherNameIsAnErrorOfEveryCall) {
  EXPECT_REFUSED(multiply_nothing(), AB_UNSUPPORTED,
                 "ANABRANCH_CUDA_PATH: got fast, expected hopper, portable, plain or nothing");
  const char* path = nullptr;
  EXPECT_REFUSED(ab_cuda_experts_path(AB_FLOAT32, 4, 2, 8, 32, 2, 48, &path, nullptr), AB_UNSUPPORTED,
                 "ANABRANCH_CUDA_PATH: got fast");
}

}  // namespace
}  // namespace anabranch::testing
