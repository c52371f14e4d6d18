// Bad arguments of the functions that bound the CUDA library's workspaces. The Python tests compare the bounds
// themselves with that library.
#include "anabranch/cuda_workspaces.h"

#include <gtest/gtest.h>

#include <cfenv>

#include "support.h"

namespace anabranch::testing {
namespace {

constexpr int64_t kHuge = int64_t{1} << 62;

TEST(CudaWorkspaces, RefusesSizesBeyondAnyMemory) {
  size_t bytes = 7;
  EXPECT_REFUSED(ab_cuda_statistics_workspace_bound(-1, 1, 8, &bytes), AB_INVALID_ARGUMENT, "T: got -1, expected 0");
  EXPECT_REFUSED(ab_cuda_statistics_workspace_bound(1, kHuge, 8, &bytes), AB_INVALID_ARGUMENT, "B: got 46116860");
  EXPECT_REFUSED(ab_cuda_plan_workspace_bound(8, kHuge, &bytes), AB_INVALID_ARGUMENT, "E: got 46116860");
  EXPECT_REFUSED(ab_cuda_plan_workspace_bound(-8, 8, &bytes), AB_INVALID_ARGUMENT, "slots: got -8");
  EXPECT_REFUSED(ab_cuda_sort_chunks_workspace_bound(kHuge, &bytes), AB_INVALID_ARGUMENT, "S: got 46116860");
  EXPECT_REFUSED(ab_cuda_grouped_matmul_dw_workspace_bound(4, 0, kHuge, 8, AB_FLOAT32, AB_FLOAT32, &bytes),
                 AB_INVALID_ARGUMENT, "D: got 46116860");
  EXPECT_REFUSED(ab_cuda_grouped_matmul_combine_workspace_bound(1 << 30, 8, 8, 1 << 30, 0, AB_FLOAT32, &bytes),
                 AB_INVALID_ARGUMENT, "N: got 1073741824, expected sizes whose product is at most 2^56 bytes");
  EXPECT_REFUSED(ab_cuda_expert_ffn_forward_workspace_bound(8, -8, AB_FLOAT32, &bytes), AB_INVALID_ARGUMENT, "F: got");
  EXPECT_REFUSED(ab_cuda_expert_ffn_backward_workspace_bound(0, 8, 8, 2, kHuge, AB_FLOAT32, AB_FLOAT32, 15, &bytes),
                 AB_INVALID_ARGUMENT, "F: got 46116860");
  EXPECT_REFUSED(ab_cuda_lora_workspace_bound(8, 8, 8, 8, kHuge, 1, AB_FLOAT32, &bytes), AB_INVALID_ARGUMENT,
                 "r: got 46116860");
  EXPECT_REFUSED(ab_cuda_returning_workspace_bound(8, -1, 8, 8, AB_BFLOAT16, &bytes), AB_INVALID_ARGUMENT, "P: got -1");
  EXPECT_REFUSED(ab_cuda_returning_workspace_bound(8, kHuge, 8, 8, AB_BFLOAT16, &bytes), AB_INVALID_ARGUMENT,
                 "P: got 46116860");
  EXPECT_REFUSED(ab_cuda_arriving_workspace_bound(-1, &bytes), AB_INVALID_ARGUMENT, "E: got -1");
  EXPECT_EQ(bytes, 7u) << "a refused query must not write it";
}

TEST(CudaWorkspaces, RefusesDtypesThatAreNotFloat) {
  size_t bytes = 0;
  EXPECT_REFUSED(ab_cuda_grouped_matmul_dw_workspace_bound(8, 8, 8, 8, AB_INT32, AB_FLOAT32, &bytes),
                 AB_INVALID_ARGUMENT, "x_dtype: got ab_dtype 4, expected float16, bfloat16 or float32");
  EXPECT_REFUSED(ab_cuda_grouped_matmul_dw_workspace_bound(8, 8, 8, 8, AB_FLOAT32, 99, &bytes), AB_INVALID_ARGUMENT,
                 "d_y_dtype: got ab_dtype 99");
  EXPECT_REFUSED(ab_cuda_grouped_matmul_combine_workspace_bound(8, 8, 8, 8, 0, 0, &bytes), AB_INVALID_ARGUMENT,
                 "dtype: got ab_dtype 0");
  EXPECT_REFUSED(ab_cuda_returning_workspace_bound(8, 2, 8, 8, AB_INT32, &bytes), AB_INVALID_ARGUMENT, "dtype: got");
  EXPECT_REFUSED(ab_cuda_lora_workspace_bound(8, 8, 8, 8, 8, 1, AB_INT32, &bytes), AB_INVALID_ARGUMENT, "dtype: got");
  EXPECT_REFUSED(ab_cuda_expert_ffn_forward_workspace_bound(8, 8, AB_BOOL, &bytes), AB_INVALID_ARGUMENT, "dtype: got");
  EXPECT_REFUSED(ab_cuda_expert_ffn_backward_workspace_bound(8, 8, 8, 2, 8, AB_FLOAT32, -1, 15, &bytes),
                 AB_INVALID_ARGUMENT, "d_dtype: got ab_dtype -1");
}

TEST(CudaWorkspaces, RefusesUnknownNeeds) {
  size_t bytes = 0;
  for (const int32_t needs : {16, -1}) {
    EXPECT_REFUSED(ab_cuda_expert_ffn_backward_workspace_bound(8, 8, 8, 2, 8, AB_FLOAT32, AB_FLOAT32, needs, &bytes),
                   AB_INVALID_ARGUMENT, ("needs: got " + std::to_string(needs) + ", expected 0 to 15").c_str());
  }
}

TEST(CudaWorkspaces, RefusesANullResult) {
  for (const ab_status& status :
       {ab_cuda_statistics_workspace_bound(8, 1, 8, nullptr), ab_cuda_quantile_workspace_bound(8, nullptr),
        ab_cuda_plan_workspace_bound(8, 8, nullptr), ab_cuda_sort_chunks_workspace_bound(8, nullptr),
        ab_cuda_grouped_matmul_dw_workspace_bound(8, 8, 8, 8, AB_BFLOAT16, AB_BFLOAT16, nullptr),
        ab_cuda_grouped_matmul_combine_workspace_bound(8, 8, 8, 8, 1, AB_BFLOAT16, nullptr),
        ab_cuda_returning_workspace_bound(8, 2, 8, 8, AB_BFLOAT16, nullptr),
        ab_cuda_arriving_workspace_bound(8, nullptr),
        ab_cuda_lora_workspace_bound(8, 8, 8, 8, 8, 1, AB_BFLOAT16, nullptr),
        ab_cuda_expert_ffn_forward_workspace_bound(8, 8, AB_BFLOAT16, nullptr),
        ab_cuda_expert_ffn_backward_workspace_bound(8, 8, 8, 2, 8, AB_BFLOAT16, AB_BFLOAT16, 15, nullptr)}) {
    EXPECT_REFUSED(status, AB_INVALID_ARGUMENT, "bytes: got NULL");
  }
}

// (P - 1) T D elements of 2 bytes are 32, 96 and 224 MiB: 2, 3 and 4 chunks. Few bytes, or few columns, are one chunk.
TEST(CudaWorkspaces, HasOneChunkOfReturningSums) {
  const auto bound = [](int64_t R, int64_t P, int64_t T, int64_t N) {
    size_t bytes = 0;
    EXPECT_OK(ab_cuda_returning_workspace_bound(R, P, T, N, AB_BFLOAT16, &bytes));
    return bytes;
  };
  EXPECT_EQ(bound(128, 2, 8192, 2048), 128u * 1024 * 2);
  EXPECT_EQ(bound(128, 4, 8192, 2048), 128u * 768 * 2);
  EXPECT_EQ(bound(128, 8, 8192, 2048), 128u * 512 * 2);
  EXPECT_EQ(bound(128, 4, 64, 2048), 128u * 2048 * 2);
  EXPECT_EQ(bound(128, 4, 1 << 20, 72), 128u * 72 * 2);
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_arriving_workspace_bound(128, &bytes));
  EXPECT_EQ(bytes, 2u * 128 * 4);
}

// CUDA refuses these numbers of experts and the CPU does not. JAX queries the bound for programs of either platform.
TEST(CudaWorkspaces, AcceptsSizesThatCudaRefuses) {
  size_t bytes = 0;
  EXPECT_OK(ab_cuda_plan_workspace_bound(1000, int64_t{1} << 30, &bytes));
  EXPECT_GE(bytes, size_t{4} << 30);
  EXPECT_OK(ab_cuda_sort_chunks_workspace_bound(int64_t{1} << 33, &bytes));
  EXPECT_GE(bytes, size_t{4} << 33);
}

// A segment has R * D N / (33 * 2^19) rows. The sizes here make that a whole number of k-blocks, so a quotient that
// follows the caller's rounding mode instead of rounding to nearest would change the bound.
TEST(CudaWorkspaces, DoNotDependOnTheCallersRoundingMode) {
  const auto bound = [](int64_t N) {
    size_t bytes = 0;
    EXPECT_OK(ab_cuda_grouped_matmul_dw_workspace_bound(33 << 17, 8, 256, N, AB_BFLOAT16, AB_BFLOAT16, &bytes));
    return bytes;
  };
  for (int64_t N = 8; N < 4096; N += 8) {
    const size_t want = bound(N);
    std::fesetround(FE_DOWNWARD);
    const size_t got = bound(N);
    std::fesetround(FE_TONEAREST);
    EXPECT_EQ(got, want) << N;
  }
}

}  // namespace
}  // namespace anabranch::testing
