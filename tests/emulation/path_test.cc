// The choice of the kernel path, and the effect of ANABRANCH_CUDA_PATH. One run per value of that variable.
#include "experts/cuda/path.h"

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "anabranch/cuda.h"
#include "experts/cuda/packed_path.h"
#include "float_tensor.h"
#include "grouped_matmul_args.h"

namespace anabranch::testing {
namespace {

using cuda::Path;
using cuda::PathChoice;

constexpr cuda::Device kAmpere{108, 80};
constexpr cuda::Device kHopper{132, 90};

cuda::RowsProduct gemm(int64_t R = 5) {
  cuda::RowsProduct gemm;
  gemm.dtype = AB_FLOAT32;
  gemm.R = R;
  gemm.E = gemm.D = gemm.N = 5;
  return gemm;
}

ab_status multiply_empty() {
  const FloatTensor x({0, 3}, AB_FLOAT32), w({2, 3, 4}, AB_FLOAT32), y({0, 4}, AB_FLOAT32);
  const Tensor<int32_t> sizes({2}, {0, 0});
  const ab_grouped_matmul_args args = grouped_matmul_args(x.view(), w.view(), sizes.view(), y.view());
  return ab_cuda_grouped_matmul(&args, nullptr);
}

// Bad arguments are reported before the unsupported precision.
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

TEST(WithoutAVariable, TheFirstSupportedPathIsUsed) {
  PathChoice choice = cuda::choose_path(gemm(), kAmpere);
  EXPECT_EQ(choice.path, Path::portable);
  EXPECT_STREQ(choice.hopper_unsupported_reason, "the compute capability is not 9.0");
  choice = cuda::choose_path(gemm(), kHopper);
  EXPECT_EQ(choice.path, Path::portable);
  EXPECT_STREQ(choice.hopper_unsupported_reason, "the device is emulated");
  EXPECT_OK(multiply_empty());
}

constexpr int64_t kTooMany = int64_t{1} << 30;

// A view of a tensor that must not be read.
ab_tensor unread(int32_t dtype, std::vector<int64_t> shape) {
  alignas(64) static char memory[64];
  ab_tensor tensor{memory, dtype, static_cast<int32_t>(shape.size()), {}, nullptr};
  std::copy(shape.begin(), shape.end(), tensor.shape);
  return tensor;
}

TEST(WithoutAVariable, SizesBeyondInt32IndexingAreRefusedByName) {
  const ab_tensor sizes = unread(AB_INT32, {1});
  for (const auto& [R, D, N, message] :
       {std::tuple{kTooMany, int64_t{1}, int64_t{1}, "R: got 1073741824, expected fewer than 2^30 on a GPU"},
        {int64_t{1}, kTooMany, int64_t{1}, "rows of w: got 1073741824, expected fewer than 2^30"},
        {int64_t{1}, int64_t{1}, kTooMany, "columns of w: got 1073741824, expected fewer than 2^30"},
        {int64_t{1} << 25, int64_t{1}, int64_t{1} << 16, "tiles of y: got 1073743872, expected fewer than 2^30"}}) {
    const ab_tensor x = unread(AB_FLOAT32, {R, D}), w = unread(AB_FLOAT32, {1, D, N}), y = unread(AB_FLOAT32, {R, N});
    const ab_grouped_matmul_args args = grouped_matmul_args(&x, &w, &sizes, &y);
    EXPECT_REFUSED(ab_cuda_grouped_matmul(&args, nullptr), AB_UNSUPPORTED, message);
  }
  EXPECT_OK(cuda::portable::check(gemm(kTooMany - 1)));
  const ab_tensor rows = unread(AB_FLOAT32, {kTooMany, 1}), d_w = unread(AB_FLOAT32, {1, 1, 1});
  ab_grouped_matmul_dw_args dw{};
  dw.size = sizeof(dw);
  dw.x = dw.d_y = &rows;
  dw.group_sizes = &sizes;
  dw.d_w = &d_w;
  ab_exec exec{sizeof(exec), 0, nullptr, rows.data, 0};  // smaller than it claims, so it must not be written
  EXPECT_OK(ab_cuda_grouped_matmul_dw_workspace(&dw, nullptr, &exec.workspace_size));
  EXPECT_REFUSED(ab_cuda_grouped_matmul_dw(&dw, &exec), AB_UNSUPPORTED,
                 "R: got 1073741824, expected fewer than 2^30 on a GPU");
}

// The path of a layer on the emulated device of compute capability 8.0.
struct LayerPath {
  const char* path = nullptr;
  const char* unsupported_reason = nullptr;

  explicit LayerPath(int32_t dtype, int64_t T = 64, int32_t w_in_transposed = 0, int32_t w_out_transposed = 0,
                     int32_t backward = 1) {
    EXPECT_OK(ab_cuda_experts_path(dtype, T, 2, 8, 32, 2, 48, w_in_transposed, w_out_transposed, backward, &path,
                                   &unsupported_reason));
  }
};

TEST(WithoutAVariable, ALayerRunsOnThePathOfItsGemms) {
  for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
    const LayerPath layer(dtype);
    EXPECT_STREQ(layer.path, "portable");
    EXPECT_STREQ(layer.unsupported_reason, "the compute capability is not 9.0");
  }
  EXPECT_STREQ(LayerPath(AB_BFLOAT16, 0).path, "portable");
  const char* path = nullptr;
  EXPECT_REFUSED(ab_cuda_experts_path(AB_BFLOAT16, 64, 2, 8, kTooMany, 2, 48, 0, 0, 1, &path, nullptr), AB_UNSUPPORTED,
                 "D: got 1073741824, expected fewer than 2^30 on a GPU");
}

// With 8 experts and 2 experts per token, up to 16 tokens give at most 4 rows per expert.
TEST(WithoutAVariable, GemmsOfFewRowsAreNamed) {
  EXPECT_STREQ(LayerPath(AB_BFLOAT16, 16, 1, 1, 0).path, "few_rows");
  EXPECT_EQ(LayerPath(AB_BFLOAT16, 16, 1, 1, 0).unsupported_reason, nullptr);
  EXPECT_STREQ(LayerPath(AB_BFLOAT16, 16, 1, 1, 1).path, "few_rows+portable");
  EXPECT_STREQ(LayerPath(AB_BFLOAT16, 16, 1, 1, 1).unsupported_reason, "the compute capability is not 9.0");
  EXPECT_STREQ(LayerPath(AB_BFLOAT16, 16, 1, 0, 0).path, "few_rows+portable");
  EXPECT_STREQ(LayerPath(AB_BFLOAT16, 16, 0, 0, 0).path, "portable");
  EXPECT_STREQ(LayerPath(AB_BFLOAT16, 16, 0, 0, 1).path, "few_rows+portable") << "the gradient of x";
  EXPECT_STREQ(LayerPath(AB_FLOAT32, 16, 1, 1, 0).path, "portable");
  EXPECT_STREQ(LayerPath(AB_BFLOAT16, 17, 1, 1, 0).path, "portable");
}

TEST(WithoutAVariable, AnInvalidLayerIsRefused) {
  const char* path = nullptr;
  const auto refused = [&](int32_t dtype, int64_t T, int64_t K, int64_t F, int64_t P, const char* message) {
    EXPECT_REFUSED(ab_cuda_experts_path(dtype, T, K, 8, 32, P, F, 0, 0, 1, &path, nullptr), AB_INVALID_ARGUMENT,
                   message);
  };
  refused(AB_INT32, 4, 2, 48, 2, "dtype: got ab_dtype 4, expected float16, bfloat16 or float32");
  refused(AB_FLOAT32, 4, 2, -1, 2, "F: got -1, expected 0 to 2^31 - 1");
  refused(AB_FLOAT32, 4, 2, 48, 3, "P: got 3, expected 1 or 2");
  refused(AB_FLOAT32, int64_t{1} << 30, 2, 48, 2, "T: got 1073741824 with K = 2, expected T K < 2^31");
  EXPECT_REFUSED(ab_cuda_experts_path(AB_FLOAT32, 4, 2, 8, 32, 2, 48, 0, 0, 1, nullptr, nullptr), AB_INVALID_ARGUMENT,
                 "path: got NULL");
  EXPECT_REFUSED(ab_cuda_experts_path(AB_FLOAT32, 4, 2, 8, 32, 2, 48, 0, 2, 1, &path, nullptr), AB_INVALID_ARGUMENT,
                 "w_out_transposed: got 2, expected 0 or 1");
  EXPECT_OK(ab_cuda_experts_path(AB_FLOAT32, 4, 2, 8, 32, 2, 48, 0, 0, 1, &path, nullptr));
}

TEST(Portable, TheVariableExcludesHopper) {
  const PathChoice choice = cuda::choose_path(gemm(), kHopper);
  EXPECT_EQ(choice.path, Path::portable);
  EXPECT_STREQ(choice.hopper_unsupported_reason, "ANABRANCH_CUDA_PATH is portable");
  EXPECT_STREQ(LayerPath(AB_BFLOAT16).unsupported_reason, "ANABRANCH_CUDA_PATH is portable");
}

TEST(Unknown, AnotherNameIsAnErrorOfEveryCall) {
  EXPECT_REFUSED(multiply_empty(), AB_UNSUPPORTED,
                 "ANABRANCH_CUDA_PATH: got fast, expected hopper, portable or nothing");
  const char* path = nullptr;
  EXPECT_REFUSED(ab_cuda_experts_path(AB_FLOAT32, 4, 2, 8, 32, 2, 48, 0, 0, 1, &path, nullptr), AB_UNSUPPORTED,
                 "ANABRANCH_CUDA_PATH: got fast");
}

TEST(PackedUnknown, AnotherValueIsAnError) {
  cuda::PackedPath path;
  EXPECT_REFUSED(cuda::choose_path(cuda::PackedRowsProduct{}, kHopper, &path), AB_UNSUPPORTED,
                 "ANABRANCH_CUDA_PACKED: got sometimes, expected always, never or nothing");
}

}  // namespace
}  // namespace anabranch::testing
