// How the plan cuts its slots on CUDA, and how large the workspaces of this folder's CUDA operations are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace anabranch::cuda {

// Slots in blocks, each with a counter for every expert and one for what is invalid. Few slots are one block's.
struct SlotBlocks {
  static constexpr int kMostWarps = 8;
  static constexpr int64_t kMostSlotsAlone = 4096;
  static constexpr int kLeastWarpsAlone = 8;  // they share the experts, too
  static constexpr int kMostWarpsAlone = 32;
  static constexpr int64_t kMostCountersAlone = 12 << 10;  // of its warps, in shared memory
  static constexpr int kSlotsPerWarp = 128;
  static constexpr int64_t kMostCounters = int64_t{1} << 22;  // of all blocks together

  int warps = 0;               // of a block, in the kernels that keep counters of each warp
  int64_t slots_per_warp = 0;  // a multiple of kSlotsPerWarp; of one block alone, of 32
  int64_t count = 0;           // of blocks
  bool alone = false;

  SlotBlocks() = default;
  SlotBlocks(int64_t slots, int64_t E) : warps(E <= 2048 ? kMostWarps : 2) {
    const int64_t batches = (slots + 31) / 32;  // of a warp
    const int64_t warps_alone = std::clamp<int64_t>(batches, kLeastWarpsAlone, kMostWarpsAlone);
    if (slots <= kMostSlotsAlone && warps_alone * E <= kMostCountersAlone) {
      warps = static_cast<int>(warps_alone);
      slots_per_warp = (batches + warps - 1) / warps * 32;
      count = 1;
      alone = true;
      return;
    }
    const int64_t units = (slots + kSlotsPerWarp - 1) / kSlotsPerWarp;
    const int64_t most_warps = std::max(kMostCounters / (E + 1), int64_t{1}) * warps;
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
