// Asynchronous copies to shared memory (cp.async) are waited for in groups, each thread for its own.
#pragma once

namespace anabranch::cuda {

// This thread's copies since the last call make one group.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of this thread's copies are under way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace anabranch::cuda
