// router/cuda/instructions.cuh on the emulator.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/dtype.h"

namespace anabranch::cuda {

inline uint32_t min_or_max(uint32_t a, uint32_t b, bool smaller) { return smaller ? std::min(a, b) : std::max(a, b); }
inline __nv_bfloat162 min_or_max(__nv_bfloat162 a, __nv_bfloat162 b, bool smaller) {
  return smaller ? __hmin2(a, b) : __hmax2(a, b);
}

// Clears the last 12 bits of the result, which gives a relative error just below 2^-11.
inline float approx_tanh(float x) { return float_from_bits(bits_of(std::tanh(x)) & 0xfffff000u); }

inline unsigned keep_in_register(unsigned value) { return value; }

}  // namespace anabranch::cuda
