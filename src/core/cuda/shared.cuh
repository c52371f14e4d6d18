// Arrays in shared memory by their 32-bit addresses. Through pointers the compiler would compute full addresses over
// and over; an address here is a register, and constant offsets go into the instructions.
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

// T [] at an address of shared memory.
template <class T>
class SharedArray {
 public:
  __device__ __forceinline__ explicit SharedArray(unsigned address) : address_(address) {}
  __device__ __forceinline__ explicit SharedArray(const T* pointer)
      : address_(static_cast<unsigned>(__cvta_generic_to_shared(pointer))) {}

  __device__ __forceinline__ T operator[](unsigned i) const { return load_shared<T>(address_ + i * sizeof(T)); }
  __device__ __forceinline__ void set(unsigned i, T value) const { store_shared(address_ + i * sizeof(T), value); }
  __device__ __forceinline__ SharedArray from(unsigned i) const { return SharedArray(address_ + i * sizeof(T)); }
  __device__ __forceinline__ unsigned address() const { return address_; }

  // These without a branch:
  __device__ __forceinline__ void set_if(bool condition, unsigned i, T value) const {
    static_assert(sizeof(T) == 4, "the instruction takes 32-bit elements");
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p st.shared.u32 [%0], %1;}" ::"r"(address_ + i * 4),
                 "r"(__builtin_bit_cast(uint32_t, value)), "r"(static_cast<uint32_t>(condition))
                 : "memory");
  }
  __device__ __forceinline__ void count_if(bool condition, unsigned i) const {
    static_assert(sizeof(T) == 4, "the instruction takes 32-bit elements");
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p red.shared.add.u32 [%0], 1;}" ::"r"(address_ + i * 4),
                 "r"(static_cast<uint32_t>(condition))
                 : "memory");
  }
  __device__ __forceinline__ void add(unsigned i, T value) const {
    static_assert(sizeof(T) == 4, "the instruction takes 32-bit elements");
    asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address_ + i * 4), "r"(value) : "memory");
  }
  __device__ __forceinline__ void set_bits(unsigned i, uint32_t bits) const {
    static_assert(sizeof(T) == 4, "the instruction takes 32-bit elements");
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address_ + i * 4), "r"(bits) : "memory");
  }

 private:
  unsigned address_;
};

}  // namespace anabranch::cuda
