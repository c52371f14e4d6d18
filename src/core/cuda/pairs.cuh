// Instructions on packed elements: two 16-bit or four 8-bit elements per word. Where the instruction does not exist,
// plain code computes the same bits.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace anabranch::cuda {

// Byte i of the result is byte (kSelector >> 4 i) % 8 of the 8 bytes of a (first) and b. If bit 3 of that digit is set,
// it is 0x00 or 0xff instead: the most significant bit of the selected byte, repeated.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t select_bytes(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "n"(kSelector));
  return word;
#else
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = kSelector >> 4 * i & 15u;
    const uint32_t byte = ((digit & 4u) != 0u ? b : a) >> 8 * (digit & 3u) & 0xffu;
    word |= ((digit & 8u) == 0u ? byte : byte >= 128u ? 0xffu : 0u) << 8 * i;
  }
  return word;
#endif
}

// The products of two pairs of bfloat16, rounded to nearest. Denormal numbers are not flushed.
__device__ __forceinline__ uint32_t multiply_bfloat16(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t word;  // a b - 0 has the sign of a b
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(0x80008000u));
  return word;
#else
  const auto half = [&](int i) {
    const auto value = [&](uint32_t pair) { return to_float(BFloat16{static_cast<uint16_t>(pair >> 16 * i)}); };
    return static_cast<uint32_t>(from_float<BFloat16>(value(a) * value(b)).bits) << 16 * i;
  };
  return half(0) | half(1);
#endif
}

struct FloatPair {
  float x, y;
};

// The values of two e4m3 numbers, the low bytes of the word.
__device__ __forceinline__ FloatPair e4m3_pair(uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  FloatPair values;
  asm("{\n"
      ".reg .b32 pair;\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.f16x2.e4m3x2 pair, %2;\n"
      "mov.b32 {low, high}, pair;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(values.x), "=f"(values.y)
      : "h"(static_cast<uint16_t>(bytes)));
  return values;
#else
  // The bits of a float16 that is 2^-8 times the value, also for denormal numbers. The sum carries into bit 14 for NaN
  // only, and then all bits of the exponent are set.
  const uint32_t spread = select_bytes<0x1404>(bytes, 0);
  const uint32_t magnitudes = (spread & 0x7f007f00u) >> 1;
  const uint32_t words = magnitudes | ((magnitudes + 0x00800080u) & 0x40004000u) | (spread & 0x80008000u);
  const auto value = [](uint32_t bits) { return to_float(Float16{static_cast<uint16_t>(bits)}); };
#if defined(__CUDA_ARCH__)
  uint32_t values;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(values) : "r"(words), "r"(0x5c005c00u));  // times 256
  return {value(values), value(values >> 16)};
#else
  return {value(words) * 256.0f, value(words >> 16) * 256.0f};
#endif
#endif
}

}  // namespace anabranch::cuda
