// float32, bfloat16, float16 and float8_e4m3fn as storage types; arithmetic is float32. The conversions use integer
// operations, which compilers vectorise on every instruction set. Everything has internal linkage, because *.isa.cc
// files include this header.
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/inline.h"

namespace anabranch {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};

AB_INLINE float float_from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
AB_INLINE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }

AB_INLINE float to_float(float value) { return value; }

AB_INLINE float to_float(BFloat16 value) { return float_from_bits(static_cast<uint32_t>(value.bits) << 16); }

// Shift exponent and mantissa into the fields of float32: the result is the value times 2^-112 (denormals included).
AB_INLINE float to_float(Float16 value) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t scaled = bits_of(float_from_bits(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;  // infinity or NaN keeps its mantissa
  return float_from_bits((magnitude >= 0x0f800000u ? special : scaled) | sign);
#endif
}

// Denormals are multiples of 2^-9. For other values rebias the exponent and shift the mantissa.
AB_INLINE float to_float(Float8E4M3 value) {
  const uint32_t magnitude = value.bits & 0x7fu;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x80u) << 24;
  const uint32_t denormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
  const uint32_t normal = (magnitude << 20) + 0x3c000000u;
  const uint32_t finite = magnitude < 8u ? denormal : normal;
  return float_from_bits((magnitude == 0x7fu ? 0x7fc00000u : finite) | sign);
}

template <class T>
T from_float(float value);

template <>
AB_INLINE float from_float<float>(float value) {
  return value;
}

// Rounds to nearest, ties to even; NaN stays a quiet NaN.
template <>
AB_INLINE BFloat16 from_float<BFloat16>(float value) {
#if defined(__CUDA_ARCH__)
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
#endif
}

// Normal results: rebias and round away 13 bits, ties to even. Denormal results: adding 2^-1 aligns the mantissa with
// the last bit of float16, and the addition rounds.
template <>
AB_INLINE Float16 from_float<Float16>(float value) {
#if defined(__CUDA_ARCH__)
  Float16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t denormal = bits_of(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t nan_or_infinity = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
  return {static_cast<uint16_t>((magnitude >= 0x47800000u ? nan_or_infinity : finite) | sign)};
#endif
}

// Like the conversion to float16, but rounds away 20 bits, and denormal results are multiples of 2^-9. Values above 448
// saturate to 448, as on GPUs; NaN becomes 0x7f.
template <>
AB_INLINE Float8E4M3 from_float<Float8E4M3>(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t in_range = magnitude < 0x43e00000u ? magnitude : 0x43e00000u;  // 448
  const uint32_t normal = (in_range - 0x3c000000u + 0x7ffffu + ((in_range >> 20) & 1u)) >> 20;
  const uint32_t denormal = bits_of(float_from_bits(in_range) + 0x1p14f) - 0x46800000u;
  const uint32_t finite = (in_range < 0x3c800000u ? denormal : normal) | sign;
  return {static_cast<uint8_t>(magnitude > 0x7f800000u ? 0x7fu : finite)};
}

// Calls f(T{}) with the C++ type of a checked float dtype, which must not be e4m3.
template <class F>
AB_INLINE auto with_float_type(int32_t dtype, F&& f) {
  switch (dtype) {
    case AB_BFLOAT16: return f(BFloat16{});
    case AB_FLOAT16: return f(Float16{});
    default: return f(float{});
  }
}

}  // namespace
}  // namespace anabranch
