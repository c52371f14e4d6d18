// The shared memory that a launch asks for.
#pragma once

namespace anabranch::cuda {

template <class T>
__device__ __forceinline__ T& dynamic_shared_memory() {
  extern __shared__ __align__(256) char memory[];
  static_assert(alignof(T) <= 256, "dynamic shared memory is declared with an alignment of 256 bytes");
  return *reinterpret_cast<T*>(memory);
}

}  // namespace anabranch::cuda
