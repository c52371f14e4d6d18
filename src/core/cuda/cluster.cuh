// Clusters: neighbouring blocks that run at a time on neighbouring multiprocessors and reach each other's shared
// memory.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// The block's place in its cluster of kBlocks.
template <int kBlocks>
__device__ __forceinline__ uint32_t block_in_cluster() {
  return kBlocks == 1 ? 0 : blockIdx.x % kBlocks;
}

// A barrier for all threads of the blocks of a cluster; of the block, if it is alone.
template <int kBlocks>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
  }
}

// What a block loads of an operand that the blocks of a cluster have in common: of its boxes the first-th, and every
// count-th from there on, to the shared memory of all blocks in the set `to`, at the same place in each.
template <int kBlocks>
struct Multicast {
  int first;
  int count;
  uint16_t to;

  // multicasts: else the block loads everything, for itself alone.
  __device__ static Multicast of(bool multicasts) {
    const auto block = static_cast<int>(block_in_cluster<kBlocks>());
    if (multicasts) return {block, kBlocks, static_cast<uint16_t>((1 << kBlocks) - 1)};
    return {0, 1, static_cast<uint16_t>(1 << block)};
  }
};

// Of a block that is alone.
template <>
struct Multicast<1> {
  static constexpr int first = 0;
  static constexpr int count = 1;

  __device__ static Multicast of(bool) { return {}; }
};

}  // namespace anabranch::cuda
