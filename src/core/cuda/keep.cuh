// Values that the compiler shall keep in registers.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// The compiler can't tell where a value comes from, so that it neither computes it anew nor derives others from it in
// every round of a loop.
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep(const char*& value) { asm volatile("" : "+l"(value)); }

}  // namespace anabranch::cuda
