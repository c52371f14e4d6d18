// The scale of a block of quantised values, bitwise equal on every backend. Functions have internal linkage because
// *.isa.cc files include this header.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/inline.h"

namespace anabranch {

constexpr int64_t kScaleBlock = 128;  // elements per scale, along each blocked axis

namespace {

// The bits of |v|, whose integer order is the order of magnitudes. NaN compares above all numbers.
AB_INLINE uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7fffffffu; }

// Returns the scale m / 448 of a block with largest magnitude m, so that q = v / scale fits e4m3. The scale is at least
// the smallest normal number, because denormal numbers have too little precision.
AB_INLINE float block_scale(uint32_t largest, bool power_of_two) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  constexpr uint32_t kMinNormal = 0x00800000u;
  const float ratio = float_from_bits(largest) / 448.0f;
  const uint32_t normal = bits_of(ratio) < kMinNormal ? kMinNormal : bits_of(ratio);
  // Adding at most 0x7fffff carries into the exponent unless the mantissa is 0.
  const uint32_t rounded_up = (normal + (kMinNormal - 1)) & kInfinity;
  const float scale = float_from_bits(power_of_two ? rounded_up : normal);
  return largest >= kInfinity ? float_from_bits(0x7fc00000u) : largest == 0u ? 1.0f : scale;
}

}  // namespace
}  // namespace anabranch
