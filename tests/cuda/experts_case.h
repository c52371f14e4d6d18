// Helpers for the tests of the experts on the GPU.
#pragma once

#include <algorithm>
#include <vector>

#include "device.h"
#include "float_tensor.h"

namespace anabranch::testing {

// Skips on GPUs that the experts do not support.
class ExpertsCudaTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    cudaDeviceProp properties;
    EXPECT_CUDA(cudaGetDeviceProperties(&properties, 0));
    if (properties.major < 8) GTEST_SKIP() << "NO GPU OF COMPUTE CAPABILITY 8.0 FOUND: " << properties.name;
  }
};

inline const std::vector<int32_t> kUneven = {0, 1, 128, 0, 0, 129, 127, 700, 0, 64, 65, 3};

// Expert e has rows [ends[e - 1], ends[e]).
inline std::vector<int64_t> ends_of(const std::vector<int32_t>& sizes, int64_t R) {
  std::vector<int64_t> ends;
  int64_t end = 0;
  for (const int32_t size : sizes) ends.push_back(end += std::clamp<int64_t>(size, 0, R - end));
  return ends;
}

}  // namespace anabranch::testing
