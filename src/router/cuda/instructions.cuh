// Instructions of the router that the compiler does not select by itself.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace anabranch::cuda {

// min(a, b) if `smaller`, else max(a, b). These are two instructions in assembly, because the compiler would insert
// moves.
__device__ __forceinline__ uint32_t min_or_max(uint32_t a, uint32_t b, bool smaller) {
  uint32_t chosen;
  asm("{.reg .pred p; setp.ne.u32 p, %3, 0; max.u32 %0, %1, %2; @p min.u32 %0, %1, %2;}"
      : "=&r"(chosen)
      : "r"(a), "r"(b), "r"(static_cast<uint32_t>(smaller)));
  return chosen;
}
__device__ __forceinline__ __nv_bfloat162 min_or_max(__nv_bfloat162 a, __nv_bfloat162 b, bool smaller) {
  uint32_t chosen;
  asm("{.reg .pred p; setp.ne.u32 p, %3, 0; max.bf16x2 %0, %1, %2; @p min.bf16x2 %0, %1, %2;}"
      : "=&r"(chosen)
      : "r"(*reinterpret_cast<const uint32_t*>(&a)), "r"(*reinterpret_cast<const uint32_t*>(&b)),
        "r"(static_cast<uint32_t>(smaller)));
  return *reinterpret_cast<const __nv_bfloat162*>(&chosen);
}

// tanh by the special function unit, with a relative error of at most 2^-11.
__device__ __forceinline__ float approx_tanh(float x) {
  float tanh;
  asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(x));
  return tanh;
}

// Holds an address in a register: the compiler would otherwise recompute it.
__device__ __forceinline__ unsigned keep_in_register(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace anabranch::cuda
