// What the four lanes that hold accumulators of the same rows, a quad, exchange. Lane q of a quad has columns 2 q and
// 2 q + 1 of every 8.
#pragma once

#include <cstdint>

#include "core/cuda/warp.cuh"

namespace anabranch::cuda::hopper {

// Of the accumulators of 32 columns, [group of 8 columns][2 rows][2 columns], a lane takes 8 neighbours: lane q columns
// 8 q to 8 q + 7. A 4 x 4 transpose in two steps, each with the lane that differs in one bit.
__device__ __forceinline__ void take_neighbours(float (&acc)[16]) {
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

// Of 16 columns whose pairs are the gate and the up of 8 columns, one pair of each 8 a lane's: `word` holds what came
// of the lane's pairs, 16 bits each. Afterwards the lane has the word of columns 2 q and 2 q + 1 of the 8.
__device__ __forceinline__ uint32_t gather_pair(uint32_t word) {
  const int q = lane_index() % 4;
  const int from = (lane_index() & ~3) + 2 * q % 4;
  const uint32_t first = __shfl_sync(kAllLanes, word, from);
  const uint32_t second = __shfl_sync(kAllLanes, word, from + 1);
  return __byte_perm(first, second, q < 2 ? 0x5410 : 0x7632);
}

}  // namespace anabranch::cuda::hopper
