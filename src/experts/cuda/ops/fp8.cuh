// Conversion of numbers to float8_e4m3fn: v / scale, rounded to nearest even.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "experts/block_scale.h"

namespace anabranch::cuda {

// Two numbers as two bytes, the first in the lower one.
__device__ __forceinline__ uint32_t pack_fp8(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
  return bytes;
#else
  return from_float<Float8E4M3>(low).bits | uint32_t{from_float<Float8E4M3>(high).bits} << 8;
#endif
}

// The same of quotients that one reciprocal gives, for what products are: of a quotient that lies between two numbers
// of 8 bits to 24 binary digits it may take either. The division's, by two operations more, would cost the hidden
// gradient an eighth of its time.
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
