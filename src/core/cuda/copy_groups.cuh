// Asynchronous copies to shared memory (cp.async), which are waited for in groups, each thread for its own.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// Copies 16 bytes to shared memory.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(source) : "memory");
}

// The same, or writes zeros and reads nothing; brings the 256 bytes around them into the L2 cache.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* source, bool is_there) {
  asm volatile(
      "{\n"
      ".reg .pred nothing;\n"
      "setp.eq.u32 nothing, %2, 0;\n"
      "cp.async.cg.shared.global.L2::256B [%0], [%1], 16, nothing;\n"
      "}"
      :
      : "r"(to), "l"(source), "r"(static_cast<uint32_t>(is_there))
      : "memory");
}

// The same for 4 or 8 bytes, from an address that is a multiple of that.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t to, const void* source, bool is_there) {
  static_assert(kBytes == 4 || kBytes == 8,
                "cp.async.ca copies 4 or 8 bytes here; 16 bytes have a function of their own");
  asm volatile(
      "{\n"
      ".reg .pred nothing;\n"
      "setp.eq.u32 nothing, %3, 0;\n"
      "cp.async.ca.shared.global [%0], [%1], %2, nothing;\n"
      "}"
      :
      : "r"(to), "l"(source), "n"(kBytes), "r"(static_cast<uint32_t>(is_there))
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
