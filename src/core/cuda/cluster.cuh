// Clusters: adjacent blocks that run concurrently on adjacent SMs and can access each other's shared memory.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// The rank of the block in its cluster of kBlocks blocks.
template <int kBlocks>
__device__ __forceinline__ uint32_t block_in_cluster() {
  return kBlocks == 1 ? 0 : blockIdx.x % kBlocks;
}

// Synchronises all threads of the cluster, or of the block if the cluster is one block.
template <int kBlocks>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
  }
}

// The boxes of a shared operand that a block loads: box `first` and every `count`-th box after it. They are written to
// the shared memory of all blocks in the bit set `to`, at the same address in each.
template <int kBlocks>
struct Multicast {
  int first;
  int count;
  uint16_t to;

  // Without multicast the block loads all boxes, for itself alone.
  __device__ static Multicast make(bool multicasts) {
    const auto block = static_cast<int>(block_in_cluster<kBlocks>());
    if (multicasts) return {block, kBlocks, static_cast<uint16_t>((1 << kBlocks) - 1)};
    return {0, 1, static_cast<uint16_t>(1 << block)};
  }
};

// A cluster of one block.
template <>
struct Multicast<1> {
  static constexpr int first = 0;
  static constexpr int count = 1;

  __device__ static Multicast make(bool) { return {}; }
};

}  // namespace anabranch::cuda
