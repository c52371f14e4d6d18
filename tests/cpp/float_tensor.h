// A tensor of any float dtype, read and written as float32.
#pragma once

#include <cmath>
#include <random>

#include "core/dtype.h"
#include "support.h"

namespace anabranch::testing {

class FloatTensor {
 public:
  FloatTensor(const std::vector<int64_t>& shape, int32_t dtype)
      : dtype_(dtype),
        floats_(dtype == AB_FLOAT32 ? shape : std::vector<int64_t>{0}),
        halves_(dtype == AB_FLOAT32 ? std::vector<int64_t>{0} : shape, dtype == AB_FLOAT32 ? AB_BFLOAT16 : dtype) {}

  const ab_tensor* view() const { return dtype_ == AB_FLOAT32 ? floats_.view() : halves_.view(); }
  int32_t dtype() const { return dtype_; }
  int64_t size() const { return dtype_ == AB_FLOAT32 ? floats_.size() : halves_.size(); }
  int64_t element_bytes() const { return dtype_ == AB_FLOAT32 ? 4 : 2; }

  float get(int64_t i) const {
    switch (dtype_) {
      case AB_FLOAT32: return floats_[i];
      case AB_BFLOAT16: return to_float(BFloat16{halves_[i]});
      default: return to_float(Float16{halves_[i]});
    }
  }
  void set(int64_t i, float value) {
    switch (dtype_) {
      case AB_FLOAT32: floats_[i] = value; break;
      case AB_BFLOAT16: halves_[i] = from_float<BFloat16>(value).bits; break;
      default: halves_[i] = from_float<Float16>(value).bits; break;
    }
  }
  void fill_normal(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < size(); ++i) set(i, normal(random));
  }

  void fill_uniform(unsigned seed) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    for (int64_t i = 0; i < size(); ++i) set(i, uniform(random));
  }

  // Whether all elements have the same bits; all NaNs count as equal.
  bool is(const FloatTensor& other) const {
    if (size() != other.size() || dtype_ != other.dtype_) return false;
    for (int64_t i = 0; i < size(); ++i) {
      const float a = get(i);
      const float b = other.get(i);
      if (bits_of(a) != bits_of(b) && !(std::isnan(a) && std::isnan(b))) return false;
    }
    return true;
  }

 private:
  int32_t dtype_;
  Tensor<float> floats_;
  Tensor<uint16_t> halves_;
};

// Returns the largest relative error of rounding to a dtype.
inline double rounding_of(int32_t dtype) {
  switch (dtype) {
    case AB_FLOAT32: return 0x1p-24;
    case AB_BFLOAT16: return 0x1p-8;
    default: return 0x1p-11;
  }
}

}  // namespace anabranch::testing
