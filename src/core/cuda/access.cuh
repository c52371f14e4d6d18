// Single instructions that the compiler does not choose by itself: predicated accesses of up to 16 bytes to memory that
// nobody comes back for soon, and conversions of two numbers at a time.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace anabranch::cuda {

// Reads a word if it is there; else it has any value. Wide words without a branch: of an `if` the compiler makes one in
// which it computes the address anew.
__device__ __forceinline__ void load_if(bool there, const uint4* from, uint4* word) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n@p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%5];\n}"
               : "=r"(word->x), "=r"(word->y), "=r"(word->z), "=r"(word->w)
               : "r"(static_cast<unsigned>(there)), "l"(from));
}
__device__ __forceinline__ void load_if(bool there, const uint2* from, uint2* word) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.cs.v2.u32 {%0, %1}, [%3];\n}"
               : "=r"(word->x), "=r"(word->y)
               : "r"(static_cast<unsigned>(there)), "l"(from));
}
template <class Scalar>
__device__ __forceinline__ void load_if(bool there, const Scalar* from, Scalar* word) {
  if (there) *word = __ldcs(from);
}

// Reads what nobody comes back for, of lines that are read whole: 256 bytes at a time come to the second-level cache.
__device__ __forceinline__ uint4 load_of_stream(const uint4* from) {
  uint4 word;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from));
  return word;
}

// Writes a word if it is there.
__device__ __forceinline__ void store_if(bool there, uint4* to, const uint4& word) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.cs.v4.u32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                   static_cast<unsigned>(there)),
               "l"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}
__device__ __forceinline__ void store_if(bool there, uint2* to, const uint2& word) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.cs.v2.u32 [%1], {%2, %3};\n}" ::"r"(
                   static_cast<unsigned>(there)),
               "l"(to), "r"(word.x), "r"(word.y)
               : "memory");
}
template <class Scalar>
__device__ __forceinline__ void store_if(bool there, Scalar* to, const Scalar& word) {
  if (there) __stcs(to, word);
}

// Brings what stands there into the second-level cache, for a read that comes later. It takes no register until then.
__device__ __forceinline__ void prefetch_if(bool there, const void* at) {
  if (there) asm volatile("prefetch.global.L2 [%0];" : : "l"(at));
}

// Makes the compiler forget what it knows about a word, so that it cannot move work on it out of a loop.
__device__ __forceinline__ void forget(uint4* word) {
  asm volatile("" : "+r"(word->x), "+r"(word->y), "+r"(word->z), "+r"(word->w));
}
__device__ __forceinline__ void forget(uint2* word) { asm volatile("" : "+r"(word->x), "+r"(word->y)); }
template <class Scalar>
__device__ __forceinline__ void forget(Scalar*) {}

// Two numbers as one word, the first in its lower half.
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

// And back.
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
