// Finds the lanes of a warp that have the same value.
#pragma once

#include "core/cuda/warp.cuh"

namespace anabranch::cuda {

// The lanes whose `bits` lowest bits equal those of this lane. Faster than __match_any_sync, which takes one step per
// distinct value.
__device__ __forceinline__ unsigned lanes_with_same(int32_t value, int bits) {
  unsigned same = kAllLanes;
  for (int bit = 0; bit < bits; ++bit) {
    const bool set = (value >> bit & 1) != 0;
    const unsigned lanes = __ballot_sync(kAllLanes, set);
    same &= set ? lanes : ~lanes;
  }
  return same;
}

}  // namespace anabranch::cuda
