// Arrays in shared memory, accessed by 32-bit address.
#pragma once

#include <cstdint>

#include "core/cuda/shared.cuh"

namespace anabranch::cuda {

// An array of T at an address in shared memory.
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

  __device__ __forceinline__ void set_if(bool condition, unsigned i, T value) const {
    store_shared_if(condition, address_of(i), __builtin_bit_cast(uint32_t, value));
  }
  __device__ __forceinline__ void count_if(bool condition, unsigned i) const {
    increment_shared_if(condition, address_of(i));
  }
  __device__ __forceinline__ void add(unsigned i, T value) const {
    add_shared(address_of(i), static_cast<uint32_t>(value));
  }
  __device__ __forceinline__ void set_bits(unsigned i, uint32_t bits) const { or_shared(address_of(i), bits); }

 private:
  __device__ __forceinline__ unsigned address_of(unsigned i) const {
    static_assert(sizeof(T) == 4, "only words of 4 bytes are changed in place");
    return address_ + i * 4;
  }

  unsigned address_;
};

}  // namespace anabranch::cuda
