// Exchanges within a quad: the four lanes that hold accumulators of the same rows. Lane q of a quad holds columns 2 q
// and 2 q + 1 of every 8.
#pragma once

#include <cstdint>

#include "core/cuda/warp.cuh"

namespace anabranch::cuda::hopper {

// Redistributes the accumulators of 32 columns, [group of 8 columns][2 rows][2 columns], so that lane q holds columns 8
// q to 8 q + 7. This is a 4 x 4 transpose in two steps; each step exchanges with the lane that differs in one bit.
__device__ __forceinline__ void transpose_quad(float (&acc)[16]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane_index() & bit) != 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if ((i / 4 & bit) != 0) continue;
      float& low = acc[i];
      float& high = acc[i + bit * 4];
      const float other = __shfl_xor_sync(kAllLanes, upper ? low : high, bit);
      low = upper ? other : low;
      high = upper ? high : other;
    }
  }
}

// For 16 columns that alternate gate and up of 8 columns: each lane computed two results, one for its pair in each 8
// columns, packed in `word`. Returns the word with the results of columns 2 q and 2 q + 1 of the 8.
__device__ __forceinline__ uint32_t gather_pair(uint32_t word) {
  const int q = lane_index() % 4;
  const int from = (lane_index() & ~3) + 2 * q % 4;
  const uint32_t first = __shfl_sync(kAllLanes, word, from);
  const uint32_t second = __shfl_sync(kAllLanes, word, from + 1);
  return __byte_perm(first, second, q < 2 ? 0x5410 : 0x7632);
}

}  // namespace anabranch::cuda::hopper
