// The scale of a block of quantised numbers, in operations that every backend has to the bit. Internal linkage:
// included by *.isa.cc files.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/inline.h"

namespace anabranch {

constexpr int64_t kScaleBlock = 128;  // elements that share a scale, along each axis that is cut

namespace {

// |v| as an integer: the largest of a block is that of the largest number, or above all numbers' where one is none.
AB_INLINE uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7fffffffu; }

// Of a block whose largest magnitude is `largest`: m / 448, so that q = v / scale is in e4m3's range, but no denormal
// number, which has too few digits for that.
AB_INLINE float block_scale(uint32_t largest, bool power_of_two) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  constexpr uint32_t kLeastNormal = 0x00800000u;
  const float ratio = float_from_bits(largest) / 448.0f;
  const uint32_t normal = bits_of(ratio) < kLeastNormal ? kLeastNormal : bits_of(ratio);
  const uint32_t rounded_up =
      (normal + (kLeastNormal - 1)) & kInfinity;  // 0x7fffff at most is carried into the exponent
  const float scale = float_from_bits(power_of_two ? rounded_up : normal);
  return largest >= kInfinity ? float_from_bits(0x7fc00000u) : largest == 0u ? 1.0f : scale;
}

}  // namespace
}  // namespace anabranch
