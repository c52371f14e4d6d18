// Accesses to shared memory by 32-bit address. With pointers the compiler recomputes 64-bit addresses at each access. A
// 32-bit address is one register, and constant offsets are encoded in the instructions.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

template <class T>
__device__ __forceinline__ T load_shared(unsigned address) {
  if constexpr (sizeof(T) == 16) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return __builtin_bit_cast(T, v);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return __builtin_bit_cast(T, v);
  } else if constexpr (sizeof(T) == 2) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return __builtin_bit_cast(T, v);
  } else {
    static_assert(sizeof(T) == 1, "elements have 1, 2, 4 or 16 bytes");
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return static_cast<T>(v);
  }
}

template <class T>
__device__ __forceinline__ void store_shared(unsigned address, T value) {
  if constexpr (sizeof(T) == 16) {
    const auto v = __builtin_bit_cast(uint4, value);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(__builtin_bit_cast(uint32_t, value)) : "memory");
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(__builtin_bit_cast(uint16_t, value)) : "memory");
  } else {
    static_assert(sizeof(T) == 1, "elements have 1, 2, 4 or 16 bytes");
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(static_cast<uint32_t>(value)) : "memory");
  }
}

// Predicated accesses, without a branch.
__device__ __forceinline__ void store_shared_if(bool condition, unsigned address, uint32_t value) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p st.shared.u32 [%0], %1;}" ::"r"(address), "r"(value),
               "r"(static_cast<uint32_t>(condition))
               : "memory");
}
__device__ __forceinline__ void increment_shared_if(bool condition, unsigned address) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p red.shared.add.u32 [%0], 1;}" ::"r"(address),
               "r"(static_cast<uint32_t>(condition))
               : "memory");
}
__device__ __forceinline__ void add_shared(unsigned address, uint32_t value) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void or_shared(unsigned address, uint32_t bits) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}

}  // namespace anabranch::cuda
