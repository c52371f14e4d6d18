// The dynamic shared memory of a kernel.
#pragma once

namespace anabranch::cuda {

// Returns the memory as an array. The launch determines its length.
template <class T>
__device__ __forceinline__ T* dynamic_shared_array() {
  extern __shared__ __align__(256) char memory[];
  static_assert(alignof(T) <= 256, "shared memory begins at a multiple of 256 bytes");
  return reinterpret_cast<T*>(memory);
}

// Returns the memory as one object.
template <class T>
__device__ __forceinline__ T& dynamic_shared_memory() {
  return *dynamic_shared_array<T>();
}

}  // namespace anabranch::cuda
