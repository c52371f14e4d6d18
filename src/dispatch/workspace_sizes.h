// How the plan cuts its slots on CUDA, and how large the workspaces of this folder's CUDA operations are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace anabranch::cuda {

// Slots in blocks, each with a counter for every expert and one for what is invalid.
struct SlotBlocks {
  static constexpr int kMostWarps = 8;
  static constexpr int kSlotsPerWarp = 128;
  static constexpr int64_t kMostCounters = int64_t{1} << 22;  // of all blocks together

  int warps = 0;               // of a block, in the kernels that keep counters of each warp
  int64_t slots_per_warp = 0;  // a multiple of kSlotsPerWarp
  int64_t count = 0;           // of blocks

  SlotBlocks() = default;
  SlotBlocks(int64_t slots, int64_t E) : warps(E <= 2048 ? kMostWarps : 2) {
    const int64_t most_warps = std::max(kMostCounters / (E + 1), int64_t{1}) * warps;
    const int64_t units = (slots + kSlotsPerWarp - 1) / kSlotsPerWarp;
    slots_per_warp = std::max((units + most_warps - 1) / most_warps, int64_t{1}) * kSlotsPerWarp;
    const int64_t per_block = slots_per_warp * warps;
    count = std::max((slots + per_block - 1) / per_block, int64_t{1});
  }
};

// The counters of every block, and their sums.
inline size_t plan_bytes(const SlotBlocks& blocks, int64_t E) {
  return static_cast<size_t>((blocks.count + 1) * (E + 1)) * sizeof(int32_t);
}

// Where S chunks and the rest begin on both sides, and which place names each chunk.
constexpr size_t sort_chunks_bytes(int64_t S) { return static_cast<size_t>(3 * S + 2) * sizeof(int32_t); }

}  // namespace anabranch::cuda
