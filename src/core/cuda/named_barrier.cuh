// Named barriers for a subset of the warps of a block.
#pragma once

#include "core/cuda/warp.cuh"

namespace anabranch::cuda {

// Waits until `warps` warps of the block have called it with the same barrier, which must be 1 to 15.
__device__ __forceinline__ void sync_some_warps(int barrier, int warps) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(warps * kWarp) : "memory");
}

}  // namespace anabranch::cuda
