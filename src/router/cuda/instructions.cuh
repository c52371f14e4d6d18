// Single instructions of the router that the compiler does not choose by itself.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace anabranch::cuda {

// The larger one, or the smaller one where asked: two instructions, written out since the compiler would move results
// about.
__device__ __forceinline__ uint32_t choose_of(uint32_t a, uint32_t b, bool smaller) {
  uint32_t chosen;
  asm("{.reg .pred p; setp.ne.u32 p, %3, 0; max.u32 %0, %1, %2; @p min.u32 %0, %1, %2;}"
      : "=&r"(chosen)
      : "r"(a), "r"(b), "r"(static_cast<uint32_t>(smaller)));
  return chosen;
}
__device__ __forceinline__ __nv_bfloat162 choose_of(__nv_bfloat162 a, __nv_bfloat162 b, bool smaller) {
  uint32_t chosen;
  asm("{.reg .pred p; setp.ne.u32 p, %3, 0; max.bf16x2 %0, %1, %2; @p min.bf16x2 %0, %1, %2;}"
      : "=&r"(chosen)
      : "r"(*reinterpret_cast<const uint32_t*>(&a)), "r"(*reinterpret_cast<const uint32_t*>(&b)),
        "r"(static_cast<uint32_t>(smaller)));
  return *reinterpret_cast<const __nv_bfloat162*>(&chosen);
}

// tanh by the special function unit, off by 2^-11 of its value at most.
__device__ __forceinline__ float rough_tanh(float x) {
  float tanh;
  asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(x));
  return tanh;
}

// Keeps an address in its register: the compiler would rather compute it again.
__device__ __forceinline__ unsigned keep_in_register(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace anabranch::cuda
