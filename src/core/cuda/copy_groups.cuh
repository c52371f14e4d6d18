// Asynchronous copies to shared memory (cp.async), which are waited for in groups, each thread for its own.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// Copies 16 bytes to shared memory.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(source) : "memory");
}

// The same for the first `bytes` of them and zeros for the rest; brings the 256 bytes around them into the L2 cache.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* source, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
               :
               : "r"(to), "l"(source), "r"(bytes)
               : "memory");
}

// The first `bytes` of 4 or 8, from an address that is a multiple of that, and zeros for the rest.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t to, const void* source, uint32_t bytes) {
  static_assert(kBytes == 4 || kBytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
               :
               : "r"(to), "l"(source), "n"(kBytes), "r"(bytes)
               : "memory");
}

// This thread's copies since the last call make one group.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of this thread's copies are under way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace anabranch::cuda
