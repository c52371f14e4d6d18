// The bfloat16 pair functions that the project uses, on the emulator.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 value) { return anabranch::to_float(anabranch::BFloat16{value.bits}); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  return {anabranch::from_float<anabranch::BFloat16>(value).bits};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline __nv_bfloat162 __float2bfloat162_rn(float value) { return __floats2bfloat162_rn(value, value); }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
inline float __low2float(__nv_bfloat162 pair) { return __bfloat162float(pair.x); }
inline float __high2float(__nv_bfloat162 pair) { return __bfloat162float(pair.y); }

template <class F>
__nv_bfloat162 map_halves(__nv_bfloat162 a, __nv_bfloat162 b, const F& f) {
  return __floats2bfloat162_rn(f(__low2float(a), __low2float(b)), f(__high2float(a), __high2float(b)));
}
// These return the number if one operand is NaN.
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return map_halves(a, b, [](float x, float y) { return std::fmax(x, y); });
}
inline __nv_bfloat162 __hmin2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return map_halves(a, b, [](float x, float y) { return std::fmin(x, y); });
}
// Returns NaN if an operand is NaN.
inline __nv_bfloat162 __hmax2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
  return map_halves(a, b, [](float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : std::fmax(x, y); });
}
inline unsigned __hge2_mask(__nv_bfloat162 a, __nv_bfloat162 b) {
  return (__low2float(a) >= __low2float(b) ? 0xffffu : 0u) | (__high2float(a) >= __high2float(b) ? 0xffff0000u : 0u);
}
inline bool __hbeq2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __low2float(a) == __low2float(b) && __high2float(a) == __high2float(b);
}
