// Instructions that the compiler does not select by itself: predicated, streaming accesses of up to 16 bytes, and
// conversions of two elements at a time.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace anabranch::cuda {

// Loads a word if the condition holds; else leaves it unspecified. 8- and 16-byte words use a predicate: for an `if`
// the compiler emits a branch that recomputes the address.
__device__ __forceinline__ void load_if(bool condition, const uint4* from, uint4* word) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n@p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%5];\n}"
               : "=r"(word->x), "=r"(word->y), "=r"(word->z), "=r"(word->w)
               : "r"(static_cast<unsigned>(condition)), "l"(from));
}
__device__ __forceinline__ void load_if(bool condition, const uint2* from, uint2* word) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.cs.v2.u32 {%0, %1}, [%3];\n}"
               : "=r"(word->x), "=r"(word->y)
               : "r"(static_cast<unsigned>(condition)), "l"(from));
}
template <class Scalar>
__device__ __forceinline__ void load_if(bool condition, const Scalar* from, Scalar* word) {
  if (condition) *word = __ldcs(from);
}

// Loads 1, 2 or 4 bytes as an unsigned number if the condition holds; else leaves *number. L2 fetches 128 bytes.
template <int kBytes>
__device__ __forceinline__ void load_if(bool condition, const char* from, uint32_t* number) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4);
  const auto holds = static_cast<unsigned>(condition);
  if constexpr (kBytes == 4) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p ld.global.L2::128B.u32 %0, [%2];\n}"
                 : "+r"(*number)
                 : "r"(holds), "l"(from));
  } else if constexpr (kBytes == 2) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p ld.global.L2::128B.u16 %0, [%2];\n}"
                 : "+r"(*number)
                 : "r"(holds), "l"(from));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p ld.global.L2::128B.u8 %0, [%2];\n}"
                 : "+r"(*number)
                 : "r"(holds), "l"(from));
  }
}

// Loads streaming data. Use it where whole cache lines are read: L2 fetches 256 bytes at a time, L1 does not allocate.
__device__ __forceinline__ uint4 load_streaming(const uint4* from) {
  uint4 word;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from));
  return word;
}

// Loads streaming data to *word if the condition holds; else *word keeps its value.
__device__ __forceinline__ void load_streaming_if(bool condition, const void* from, uint4* word) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n@p ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%5];\n}"
      : "+r"(word->x), "+r"(word->y), "+r"(word->z), "+r"(word->w)
      : "r"(static_cast<unsigned>(condition)), "l"(from));
}

// Stores a word if the condition holds.
__device__ __forceinline__ void store_if(bool condition, uint4* to, const uint4& word) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.cs.v4.u32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                   static_cast<unsigned>(condition)),
               "l"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}
__device__ __forceinline__ void store_if(bool condition, uint2* to, const uint2& word) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.cs.v2.u32 [%1], {%2, %3};\n}" ::"r"(
                   static_cast<unsigned>(condition)),
               "l"(to), "r"(word.x), "r"(word.y)
               : "memory");
}
template <class Scalar>
__device__ __forceinline__ void store_if(bool condition, Scalar* to, const Scalar& word) {
  if (condition) __stcs(to, word);
}

// Prefetches an address into L2 for a later load, if the condition holds. The prefetch itself occupies no register.
__device__ __forceinline__ void prefetch_if(bool condition, const void* at) {
  if (condition) asm volatile("prefetch.global.L2 [%0];" : : "l"(at));
}

// Hides the value of a word from the compiler, so that it cannot hoist computations on the word out of a loop.
__device__ __forceinline__ void forget(uint4* word) {
  asm volatile("" : "+r"(word->x), "+r"(word->y), "+r"(word->z), "+r"(word->w));
}
__device__ __forceinline__ void forget(uint2* word) { asm volatile("" : "+r"(word->x), "+r"(word->y)); }
template <class Scalar>
__device__ __forceinline__ void forget(Scalar*) {}

// Packs two elements into one word, the first in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
template <>
__device__ __forceinline__ uint32_t pack<Float16>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Unpacks the lower or the upper half of a word.
template <class T>
__device__ __forceinline__ float low_half(uint32_t word) {
  return to_float(T{static_cast<uint16_t>(word)});
}
template <class T>
__device__ __forceinline__ float high_half(uint32_t word) {
  return to_float(T{static_cast<uint16_t>(word >> 16)});
}
template <>
__device__ __forceinline__ float high_half<BFloat16>(uint32_t word) {
  return float_from_bits(word & 0xffff0000u);
}

}  // namespace anabranch::cuda
