// The division of the plan's slots into blocks on CUDA, and the workspace sizes of this folder's CUDA operations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace anabranch::cuda {

// Slots in blocks, each with one counter per expert and one for invalid indices.
struct SlotBlocks {
  static constexpr int kMaxWarps = 8;
  static constexpr int kSlotsPerWarp = 128;
  static constexpr int64_t kMaxCounters = int64_t{1} << 22;  // over all blocks

  int warps = 0;               // per block, in the kernels that have counters per warp
  int64_t slots_per_warp = 0;  // a multiple of kSlotsPerWarp
  int64_t count = 0;           // number of blocks

  SlotBlocks() = default;
  SlotBlocks(int64_t slots, int64_t E) : warps(E <= 2048 ? kMaxWarps : 2) {
    const int64_t max_warps = std::max(kMaxCounters / (E + 1), int64_t{1}) * warps;
    const int64_t units = (slots + kSlotsPerWarp - 1) / kSlotsPerWarp;
    slots_per_warp = std::max((units + max_warps - 1) / max_warps, int64_t{1}) * kSlotsPerWarp;
    const int64_t per_block = slots_per_warp * warps;
    count = std::max((slots + per_block - 1) / per_block, int64_t{1});
  }
};

// Bytes for the counters of every block, and their totals.
inline size_t plan_bytes(const SlotBlocks& blocks, int64_t E) {
  return static_cast<size_t>((blocks.count + 1) * (E + 1)) * sizeof(int32_t);
}

// Bytes for the first rows of S chunks and of the tail on both sides, and for the index that names each chunk.
constexpr size_t sort_chunks_bytes(int64_t S) { return static_cast<size_t>(3 * S + 2) * sizeof(int32_t); }

}  // namespace anabranch::cuda
