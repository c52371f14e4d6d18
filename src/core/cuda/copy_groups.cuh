// Asynchronous copies to shared memory (cp.async). Each thread waits for groups of its own copies.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// Copies 16 bytes to shared memory.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(source) : "memory");
}

// Copies 16 bytes if the condition holds; else writes zeros without reading. Prefetches the surrounding 256 bytes into
// L2.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* source, bool condition) {
  asm volatile(
      "{\n"
      ".reg .pred nothing;\n"
      "setp.eq.u32 nothing, %2, 0;\n"
      "cp.async.cg.shared.global.L2::256B [%0], [%1], 16, nothing;\n"
      "}"
      :
      : "r"(to), "l"(source), "r"(static_cast<uint32_t>(condition))
      : "memory");
}

// Copies 4 or 8 bytes if the condition holds; else writes zeros without reading. The addresses must be multiples of
// the size.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t to, const void* source, bool condition) {
  static_assert(kBytes == 4 || kBytes == 8, "copy_async copies 4 or 8 bytes; use copy_async_16 for 16 bytes");
  asm volatile(
      "{\n"
      ".reg .pred nothing;\n"
      "setp.eq.u32 nothing, %3, 0;\n"
      "cp.async.ca.shared.global [%0], [%1], %2, nothing;\n"
      "}"
      :
      : "r"(to), "l"(source), "n"(kBytes), "r"(static_cast<uint32_t>(condition))
      : "memory");
}

// Closes a group that contains this thread's copies since the last call.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of this thread's copies are pending.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace anabranch::cuda
