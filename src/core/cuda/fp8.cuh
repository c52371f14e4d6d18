// float8_e4m3fn: the scale of a block of elements, and their conversion. What is quantised is v / scale, rounded to
// nearest even, with scale = max(max |v| / 448, 2^-126), or 1 for a block of zeros.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace anabranch::cuda {

constexpr float kLargestFp8 = 448.0f;

// As unsigned numbers these are in the order of magnitudes, infinity behind all finite ones and NaN behind it.
__device__ __forceinline__ uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7fffffffu; }

// Of a block whose largest magnitude has these bits; NaN if one is no finite number.
__device__ __forceinline__ float block_scale(uint32_t largest, bool power_of_two) {
  if (largest >= 0x7f800000u) return float_from_bits(0x7fc00000u);
  if (largest == 0) return 1.0f;
  const float scale = fmaxf(float_from_bits(largest) / kLargestFp8, 0x1p-126f);
  return power_of_two ? float_from_bits((bits_of(scale) + 0x7fffffu) & 0x7f800000u) : scale;
}

// Two numbers as two bytes, the first in the lower one.
__device__ __forceinline__ uint32_t pack_fp8(float low, float high) {
  uint16_t bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
  return bytes;
}

// The same of quotients that one reciprocal gives, for numbers that are sums in float32 and so rounded already: of a
// quotient that lies between two numbers of 8 bits to 24 binary digits it may take either.
class Fp8Scaler {
 public:
  __device__ __forceinline__ Fp8Scaler(uint32_t largest, bool power_of_two)
      : scale_(block_scale(largest, power_of_two)), inverse_(1.0f / scale_) {}
  __device__ __forceinline__ float scale() const { return scale_; }
  __device__ __forceinline__ uint32_t pack(float low, float high) const {
    return pack_fp8(low * inverse_, high * inverse_);
  }

 private:
  float scale_;
  float inverse_;
};

}  // namespace anabranch::cuda
