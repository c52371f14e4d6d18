// What the tests of the experts on the GPU share.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "core/dtype.h"
#include "device.h"

namespace anabranch::testing {

// Runs only on Hopper GPUs.
class HopperTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    cudaDeviceProp properties;
    EXPECT_CUDA(cudaGetDeviceProperties(&properties, 0));
    if (properties.major != 9) GTEST_SKIP() << "NO HOPPER GPU FOUND: " << properties.name;
  }
};

inline const std::vector<int32_t> kUneven = {0, 1, 128, 0, 0, 129, 127, 700, 0, 64, 65, 3};

// Float numbers stored as any of the three dtypes.
class Numbers {
 public:
  Numbers(const std::vector<int64_t>& shape, int32_t dtype)
      : dtype_(dtype),
        wide_(dtype == AB_FLOAT32 ? shape : std::vector<int64_t>{0}),
        narrow_(dtype == AB_FLOAT32 ? std::vector<int64_t>{0} : shape, dtype == AB_FLOAT32 ? AB_BFLOAT16 : dtype) {}

  const ab_tensor* view() const { return dtype_ == AB_FLOAT32 ? wide_.view() : narrow_.view(); }
  int64_t size() const { return dtype_ == AB_FLOAT32 ? wide_.size() : narrow_.size(); }
  float get(int64_t i) const {
    if (dtype_ == AB_FLOAT32) return wide_[i];
    return dtype_ == AB_BFLOAT16 ? to_float(BFloat16{narrow_[i]}) : to_float(Float16{narrow_[i]});
  }
  void set(int64_t i, float value) {
    if (dtype_ == AB_FLOAT32) {
      wide_[i] = value;
    } else {
      narrow_[i] = dtype_ == AB_BFLOAT16 ? from_float<BFloat16>(value).bits : from_float<Float16>(value).bits;
    }
  }
  void randomize(unsigned seed) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    for (int64_t i = 0; i < size(); ++i) set(i, uniform(random));
  }
  bool same_bits(const Numbers& other) const {
    return std::memcmp(view()->data, other.view()->data, static_cast<size_t>(bytes_of(*view()))) == 0;
  }

 private:
  int32_t dtype_;
  Tensor<float> wide_;
  Tensor<uint16_t> narrow_;
};

// Half a unit in the last place, relative.
inline double rounding(int32_t dtype) {
  return dtype == AB_BFLOAT16 ? 0x1p-8 : dtype == AB_FLOAT16 ? 0x1p-11 : 0x1p-24;
}

// Rows of expert e are ends[e - 1] ... ends[e] - 1.
inline std::vector<int64_t> ends_of(const std::vector<int32_t>& sizes, int64_t R) {
  std::vector<int64_t> ends;
  int64_t end = 0;
  for (const int32_t size : sizes) ends.push_back(end += std::clamp<int64_t>(size, 0, R - end));
  return ends;
}

}  // namespace anabranch::testing
