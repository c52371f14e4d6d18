// exp, log, log1p and tanh in float32 without branches or tables, so that compilers vectorise loops over them on every
// instruction set. Machines with a fused multiply-add (AVX2 and AVX-512, but not baseline x86-64) compute the same
// bits. Measured error: exp and log at most 1.01 ulp, log1p_ratio 1.4 ulp, tanh 2 ulp. Everything has internal linkage,
// because *.isa.cc files include this header.
#pragma once

#include <cstdint>

#include "core/inline.h"

namespace anabranch {
namespace {

// a b + c, rounded once if the machine has a fused multiply-add.
AB_INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__CUDACC__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// 1 / x and sqrt(x) to 1 ulp, for normal x.
AB_INLINE float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return 1.0f / x;
#endif
}
AB_INLINE float square_root(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return __builtin_sqrtf(x);
#endif
}

// condition ? a : b without a branch, since lanes seldom agree.
AB_INLINE float choose(bool condition, float a, float b) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("{.reg .pred p; setp.ne.s32 p, %3, 0; selp.f32 %0, %1, %2, p;}"
      : "=f"(r)
      : "f"(a), "f"(b), "r"(static_cast<int>(condition)));
  return r;
#else
  return condition ? a : b;
#endif
}

// min(x, bound) and max(x, bound); NaN stays NaN.
AB_INLINE float at_most(float x, float bound) { return x > bound ? bound : x; }
AB_INLINE float at_least(float x, float bound) { return x < bound ? bound : x; }

constexpr float kLog2E = 0x1.715476p0f;

#if defined(__CUDACC__)
// 2^x in one instruction, to 2 ulp; denormal results become 0.
__device__ __forceinline__ float exp2_flushed_f32(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else  // emulated GPU
  const float r = __builtin_exp2f(x);
  return r < 0x1p-126f ? 0.0f : r;
#endif
}
#endif

constexpr float kLn2High = 0x1.62e4p-1f;  // ln 2 to 15 bits: its products with exponents are exact
constexpr float kLn2Low = 0x1.7f7d1cp-20f;

// 2^n for -126 <= n <= 127.
AB_INLINE float power_of_two(int32_t n) { return __builtin_bit_cast(float, static_cast<uint32_t>(n + 127) << 23); }

// exp(r) for |r| <= ln(2)/2: 1 + r + r^2 P(r) with P minimax to 3e-9.
AB_INLINE float exp_near_zero(float r) {
  float p = multiply_add(r, 0x1.6a2392p-10f, 0x1.123a5cp-7f);
  p = multiply_add(r, p, 0x1.5558f4p-5f);
  p = multiply_add(r, p, 0x1.55549p-3f);
  p = multiply_add(r, p, 0x1.fffffcp-2f);
  return 1.0f + multiply_add(r * r, p, r);
}

// x = n ln 2 + r, |r| <= ln(2)/2, for |x| < 2^20. The low bits of `shifted` hold n; kExponentZero is the value for n =
// 0.
constexpr uint32_t kExponentZero = 0x4b400000u;
struct ExpArgument {
  float shifted, r;
};
AB_INLINE ExpArgument split_exponent(float x) {
  const float shifted = multiply_add(x, kLog2E, 0x1.8p23f);
  const float n = shifted - 0x1.8p23f;
  return {shifted, multiply_add(n, -kLn2Low, multiply_add(n, -kLn2High, x))};
}

// exp(x). Denormal results are rounded once; NaN stays NaN, exp(-inf) = 0.
AB_INLINE float exp_f32(float x) {
  const bool vanishes = x < -103.98f;  // below half of the smallest denormal
  const ExpArgument a = split_exponent(vanishes ? 0.0f : x > 89.0f ? 89.0f : x);
  const int32_t exponent = static_cast<int32_t>(__builtin_bit_cast(uint32_t, a.shifted) - kExponentZero);
  const int32_t half = exponent >> 1;  // multiply in two steps: 2^n itself may be out of range
  const float result = exp_near_zero(a.r) * power_of_two(half) * power_of_two(exponent - half);
  return vanishes ? 0.0f : result;
}

// exp(x) for x <= 88 in fewer steps: 0 below -87.3, where the result would be denormal. NaN stays NaN.
AB_INLINE float exp_flushed_f32(float x) {
#if defined(__CUDA_ARCH__)
  return exp2_flushed_f32(x * kLog2E);  // relative error 2^-23 (1 + |x|)
#else
  const ExpArgument a = split_exponent(-88.0f > x ? -88.0f : x);
  const uint32_t biased = __builtin_bit_cast(uint32_t, a.shifted) - (kExponentZero - 127u);  // 0 gives 2^n = 0
  return exp_near_zero(a.r) * __builtin_bit_cast(float, biased << 23);
#endif
}

// tanh(x) and 1 - tanh(x)^2, both with a small relative error for every x. NaN stays NaN.
struct TanhAt {
  float value, slope;
};
AB_INLINE TanhAt tanh_f32(float x) {
  const float size = __builtin_fabsf(x);
  const float e = exp_flushed_f32(-2.0f * size);
  const float r = reciprocal(1.0f + e);
  const float large = (1.0f - e) * r;
  // x + x^3 P(x^2) with P minimax to 5e-9, for small |x|, where 1 - e cancels.
  const float s = x * x;
  float p = multiply_add(s, -0x1.75e1ccp-8f, 0x1.52269ap-6f);
  p = multiply_add(s, p, -0x1.b83c5ap-5f);
  p = multiply_add(s, p, 0x1.110726p-3f);
  p = multiply_add(s, p, -0x1.555532p-2f);
  const float small = multiply_add(x * s, p, x);
  return {size < 0.625f ? small : __builtin_copysignf(large, x), 4.0f * e * r * r};
}

// log(1 + y) for sqrt(1/2) - 1 <= y <= sqrt(2) - 1: y - y^2/2 + y^3 Q(y) with Q minimax to 6e-9.
AB_INLINE float log1p_near_zero(float y) {
  float q = multiply_add(y, -0.07634498924016953f, 0.1276157796382904f);
  q = multiply_add(y, q, -0.13160182535648346f);
  q = multiply_add(y, q, 0.14201757311820984f);
  q = multiply_add(y, q, -0.16623356938362122f);
  q = multiply_add(y, q, 0.20001226663589478f);
  q = multiply_add(y, q, -0.25000819563865662f);
  q = multiply_add(y, q, 0.33333331f);
  const float square = y * y;
  return y - (0.5f * square - square * y * q);
}

// log(x) = n ln 2 + log(m), sqrt(1/2) <= m < sqrt(2). Zero gives -inf; negative numbers and NaN give NaN.
AB_INLINE float log_f32(float x) {
  const bool denormal = x < 0x1p-126f;
  const uint32_t bits = __builtin_bit_cast(uint32_t, denormal ? x * 0x1p24f : x);
  const uint32_t from_half = bits - 0x3f3504f3u;  // offset above the bits of sqrt(1/2): n is in the exponent field
  const int32_t exponent = static_cast<int32_t>(from_half) >> 23;
  const float m = __builtin_bit_cast(float, bits - (static_cast<uint32_t>(exponent) << 23));
  const float n = static_cast<float>(exponent - (denormal ? 24 : 0));
  const float result = n * kLn2High + (n * kLn2Low + log1p_near_zero(m - 1.0f));
  const float special = x == 0.0f ? -__builtin_inff() : x < 0.0f ? __builtin_nanf("") : x;  // x: +inf, NaN
  const bool ordinary = x > 0.0f && x < __builtin_inff();
  return ordinary ? result : special;
}

// log(1 + x) / x for 0 <= x <= 1, minimax to 5e-9. NaN stays NaN.
AB_INLINE float log1p_ratio(float x) {
  float p = multiply_add(x, -0.0032440247905608337f, 0.019851462853341773f);
  p = multiply_add(x, p, -0.056959540019693805f);
  p = multiply_add(x, p, 0.10603656052687022f);
  p = multiply_add(x, p, -0.1530559369403871f);
  p = multiply_add(x, p, 0.196759398476185f);
  p = multiply_add(x, p, -0.24954133828430936f);
  p = multiply_add(x, p, 0.3332996244302858f);
  p = multiply_add(x, p, -0.4999990242457492f);
  return multiply_add(x, p, 1.0f);
}

}  // namespace
}  // namespace anabranch
