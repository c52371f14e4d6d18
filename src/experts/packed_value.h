// The values of packed weights (MXFP4 and FP8 blocks), bitwise equal on every backend. Functions have internal linkage
// because *.isa.cc files include this header.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/inline.h"
#include "experts/block_scale.h"

namespace anabranch {

constexpr int64_t kMxBlock = 32;  // elements of a row per scale of MXFP4

namespace {

// 2^(scale - 127); NaN for 255. 2^-127 is a denormal number.
AB_INLINE float e8m0_value(uint8_t scale) {
  return float_from_bits(scale == 255u ? 0x7fc00000u : scale == 0u ? 0x00400000u : static_cast<uint32_t>(scale) << 23);
}

// The value of a code: 0, 0.5, 1, 1.5, 2, 3, 4 or 6 by bits 0 to 2, with the sign of bit 3.
AB_INLINE float e2m1_value(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  const uint32_t normal = ((magnitude >> 1) + 126u) << 23 | (magnitude & 1u) << 22;
  const uint32_t bits = magnitude == 0u ? 0u : magnitude == 1u ? 0x3f000000u : normal;
  return float_from_bits(bits | (code & 8u) << 28);
}

// The code of a number that is rounded to nearest, ties to the even code, and at most 6 in magnitude. value: no NaN.
AB_INLINE uint32_t e2m1_code(float value) {
  const float magnitude = float_from_bits(magnitude_bits(value));
  // Comparisons with the midpoints. A midpoint belongs to its even neighbour.
  const uint32_t code = static_cast<uint32_t>(magnitude > 0.25f) + static_cast<uint32_t>(magnitude >= 0.75f) +
                        static_cast<uint32_t>(magnitude > 1.25f) + static_cast<uint32_t>(magnitude >= 1.75f) +
                        static_cast<uint32_t>(magnitude > 2.5f) + static_cast<uint32_t>(magnitude >= 3.5f) +
                        static_cast<uint32_t>(magnitude > 5.0f);
  return code | (bits_of(value) >> 28 & 8u);
}

// The scale of a block of MXFP4 from the bits of its largest magnitude m: 2^k with k = floor(log2 m) - 2, or if `ceil`
// k = ceil(log2(m / 6)). Returns k + 127; 255 if m is NaN or infinite.
AB_INLINE uint8_t mx_scale(uint32_t largest, bool ceil) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  if (largest >= kInfinity) return 255;
  // The exponent of m. For a denormal number it is at least that of m, and k is clamped to -127 anyway.
  const auto exponent = static_cast<int32_t>(largest >> 23) - 127;
  // 6 = 1.5 * 2^2: the rules differ where the mantissa of m exceeds that of 6.
  const int32_t k = exponent - 2 + (ceil && (largest & 0x7fffffu) > 0x400000u ? 1 : 0);
  return static_cast<uint8_t>(largest == 0u || k < -127 ? 0 : k + 127);
}

}  // namespace
}  // namespace anabranch
