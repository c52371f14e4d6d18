// Conversion to FP8 (e4m3): v / scale, rounded to nearest even.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "experts/block_scale.h"

namespace anabranch::cuda {

// Packs two values into two bytes, `low` in the lower byte.
__device__ __forceinline__ uint32_t pack_fp8(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
  return bytes;
#else
  return from_float<Float8E4M3>(low).bits | uint32_t{from_float<Float8E4M3>(high).bits} << 8;
#endif
}

// Fast conversion of v / scale by a reciprocal, for GEMM results. A quotient that is a tie of two e4m3 values to 24
// bits may round either way. Correct rounding takes two more operations and would add an eighth to the time of the
// intermediate gradient.
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
