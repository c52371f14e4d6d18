// ab_cuda_describe and ab_cuda_experts_path, with and without a GPU.
#include <gtest/gtest.h>

#include <string>

#include "anabranch/cuda.h"
#include "device.h"

namespace anabranch::testing {
namespace {

std::string describe_library() {
  char text[8192];
  ab_cuda_describe(text, sizeof(text));
  return std::string("\n") + text;
}

TEST(Describe, ReturnsTheVersionsThatTheHeaderNames) {
  const std::string lines = describe_library();
  for (const char* key : {"\nversion=", "\ncuda=", "\ndriver="}) {
    EXPECT_NE(lines.find(key), std::string::npos) << "missing" << key << " in:" << lines;
  }
}

struct LayersPath {
  const char* path = "none";
  const char* unsupported_reason = nullptr;

  LayersPath(int32_t dtype, int64_t D) {
    EXPECT_OK(ab_cuda_experts_path(dtype, 64, 2, 8, D, 2, 48, 0, 0, 1, &path, &unsupported_reason));
  }
};

using DescribeCuda = CudaTest;

// Holds for any device and any value of ANABRANCH_CUDA_PATH.
TEST_F(DescribeCuda, ALayerUsesTheFirstPathThatSupportsIt) {
  constexpr char kKey[] = "\nexperts on device 0=";
  const std::string lines = describe_library();
  const size_t at = lines.find(kKey);
  ASSERT_NE(at, std::string::npos) << lines;
  const size_t begin = at + sizeof(kKey) - 1;
  const std::string first = lines.substr(begin, lines.find(' ', begin) - begin);
  for (const int32_t dtype : {AB_BFLOAT16, AB_FLOAT16}) EXPECT_EQ(LayersPath(dtype, 32).path, first);
  const LayersPath wide(AB_FLOAT32, 32);
  const LayersPath odd(AB_BFLOAT16, 31);
  if (first == "hopper") {
    EXPECT_EQ(LayersPath(AB_BFLOAT16, 32).unsupported_reason, nullptr);
    EXPECT_STREQ(wide.unsupported_reason, "the dtype is not 16-bit");
    EXPECT_STREQ(odd.unsupported_reason, "rows are not aligned or not whole 16-byte chunks");
  }
  const std::string next = first == "hopper" ? "portable" : first;
  EXPECT_EQ(wide.path, next);
  EXPECT_EQ(odd.path, next);
}

TEST(DescribeWithoutCuda, ExpertsPathReturnsTheReason) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) GTEST_SKIP() << "a GPU is present";
  const char* path = nullptr;
  EXPECT_REFUSED(ab_cuda_experts_path(AB_FLOAT32, 4, 2, 8, 32, 2, 48, 0, 0, 1, &path, nullptr), AB_UNSUPPORTED,
                 "experts_path: no usable GPU");
  EXPECT_EQ(path, nullptr);
}

}  // namespace
}  // namespace anabranch::testing
