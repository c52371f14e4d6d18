// Forces the compiler to hold values in registers.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// Hides the origin of a value, so that the compiler does not recompute it, or derive other values from it, in every
// iteration of a loop.
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep(const char*& value) { asm volatile("" : "+l"(value)); }

}  // namespace anabranch::cuda
