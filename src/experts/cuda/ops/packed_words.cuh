// Packed weights as pairs of 16-bit elements in registers. Values have the bits that ab_unpack writes.
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/cuda/access.cuh"
#include "core/cuda/pairs.cuh"
#include "experts/packed_value.h"

namespace anabranch::cuda {

// Eight consecutive elements of a row, two per word.
struct EightElements {
  uint32_t words[4];
};

constexpr uint32_t kTwoTo126 = 0x7e807e80u;  // a pair of bfloat16

// Two codes of MXFP4. The selected bytes have the first code in bits 0 to 2 and 9, the second in bits 4 to 6 and 13.
// The sum of copies shifted by 6 and 18 has both in their places; carries of other bits do not reach these.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t spread_codes(uint32_t magnitudes, uint32_t signs) {
  return select_bytes<kSelector>(magnitudes, signs) * 0x40040u & 0x81c081c0u;
}

// Eight codes of MXFP4 as bfloat16. The sign moves to bit 15 and the magnitude to bits 8 to 6, across the border of
// exponent and mantissa: this is 2^-126 times the value of the code, also for 0.5, a denormal number.
__device__ __forceinline__ EightElements decode_codes(uint32_t codes) {
  const uint32_t magnitudes = codes & 0x77777777u;
  const uint32_t signs = codes >> 2 & 0x22222222u;
  return {{spread_codes<0x8840>(magnitudes, signs), spread_codes<0x8851>(magnitudes, signs),
           spread_codes<0x8862>(magnitudes, signs), spread_codes<0x8873>(magnitudes, signs)}};
}

// Codes kFirst and kFirst + 4 of eight, for kFirst = 0 and 1, in the form of decode_codes(). The sum of copies shifted
// by 6 - 4 kFirst and 12 - 4 kFirst has magnitudes and signs in their places, without carries.
template <int kFirst>
__device__ __forceinline__ uint32_t spread_codes_apart(uint32_t codes) {
  return (codes & 0xf000fu << 4 * kFirst) * (0x1040u >> 4 * kFirst) & 0x81c081c0u;
}

// Like decode_codes(), with code i in the lower half of word i and code i + 4 in the upper half. This takes fewer
// instructions.
__device__ __forceinline__ EightElements decode_codes_apart(uint32_t codes) {
  const uint32_t rest = codes >> 8;
  return {{spread_codes_apart<0>(codes), spread_codes_apart<1>(codes), spread_codes_apart<0>(rest),
           spread_codes_apart<1>(rest)}};
}

// 2^(scale - 127) as bfloat16.
__device__ __forceinline__ uint32_t mx_factor(uint32_t scale) {
  return bits_of(e8m0_value(static_cast<uint8_t>(scale))) >> 16;
}

// Scale i of FP8 blocks.
__device__ __forceinline__ float block_scale(const void* scales, int32_t dtype, int64_t i) {
  switch (dtype) {
    case AB_FLOAT32: return static_cast<const float*>(scales)[i];
    case AB_BFLOAT16: return to_float(static_cast<const BFloat16*>(scales)[i]);
    default: return e8m0_value(static_cast<const uint8_t*>(scales)[i]);
  }
}

// Eight e4m3 numbers times a scale.
template <class Element>
__device__ __forceinline__ EightElements decode_e4m3(uint32_t low, uint32_t high, float scale) {
  const auto pair = [&](uint32_t bytes) {
    const FloatPair values = e4m3_pair(bytes);
    return pack<Element>(values.x * scale, values.y * scale);
  };
  return {{pair(low), pair(low >> 16), pair(high), pair(high >> 16)}};
}

}  // namespace anabranch::cuda
