// Operands whose rows stand elsewhere: the producer warpgroup copies them, 16 bytes a thread (cp.async).
#pragma once

#include <cstdint>

#include "core/cuda/divisor.h"
#include "core/cuda/tile_memory.cuh"
#include "core/cuda/warp.cuh"
#include "experts/hopper/tile_shape.cuh"

namespace anabranch::cuda::hopper {

constexpr int kRowChunks = kSwizzleBytes / 16;  // of a row of a panel

// Rows that stand elsewhere: row r is row slots[r] / slots_per_row of a matrix of so many rows, and zero where that is
// none of them; without slots row r itself. Places in the matrix are counted in chunks of 16 bytes.
struct GatherSource {
  const char* source;
  const int32_t* slots;  // [R], or nullptr
  Divisor slots_per_row;
  int32_t source_rows;
  int32_t row_chunks;  // of all rows together fewer than 2^32 - 1

  static constexpr uint32_t kNowhere = 0xffffffffu;

  __device__ int32_t slot_of(int32_t row) const { return slots == nullptr ? row : slots[row]; }

  // The first chunk of a slot's row.
  __device__ uint32_t place_of(int32_t slot) const {
    const int32_t row = slots_per_row.quotient(slot);
    const bool there = slot >= 0 && row < source_rows;
    return there ? static_cast<uint32_t>(row) * static_cast<uint32_t>(row_chunks) : kNowhere;
  }

  // A chunk of the row at `place`, zeros if it is not there, which reads nothing. from: the same chunk of row 0.
  static __device__ __forceinline__ void copy_chunk(uint32_t to, const char* from, uint32_t place, bool there) {
    copy_async_16(to, from + static_cast<uint64_t>(place) * 16, there && place != kNowhere);
  }
};

// An operand's Gather is one thread's part of copying the panels of a tile's k-blocks. copy() begins copies to the
// panels at `to`; the caller lets its barrier wait for this thread's copies. What the copy engine brings needs none.
struct NoGather {
  template <class Operand>
  __device__ NoGather(const Operand&, const Tile&) {}
  __device__ void copy(uint32_t, const Tile&, int) const {}
};

// Rows of a tile, a k-block of each. A warp copies 32 rows, 8 lanes a row: lane i rows i / 8 + 8 j and i / 8 + 4 + 8 j,
// so that it changes but between two places of the swizzle.
template <int kRows>
class RowGather {
 public:
  __device__ RowGather(const GatherSource& from, const Tile& tile)
      : from_(from), chunk_(lane_index() % kRowChunks), first_(swizzled(first_row() + row_of(0), chunk_)) {
    const int32_t row = tile.row + first_row() + lane_index();
    const uint32_t place = row < tile.end_row ? from.place_of(from.slot_of(row)) : GatherSource::kNowhere;
#pragma unroll
    for (int i = 0; i < kEach; ++i) places_[i] = __shfl_sync(kAllLanes, place, row_of(i));
  }

  __device__ void copy(uint32_t to, const Tile& tile, int k_block) const {
    const int32_t source_chunk = (tile.k + k_block * kBlockK) / 8 + chunk_;
    const bool there = source_chunk < from_.row_chunks;
    const char* from = from_.source + int64_t{source_chunk} * 16;
    // Four rows on, the swizzle flips a digit of the chunk.
    const uint32_t firsts[] = {to + first_, to + (first_ ^ 4 * 16) + 4 * kSwizzleBytes};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      GatherSource::copy_chunk(firsts[i / (kEach / 2)] + i % (kEach / 2) * kRowStep * kSwizzleBytes, from, places_[i],
                               there);
    }
  }

 private:
  static constexpr int kEach = 8;     // rows of a lane
  static constexpr int kRowStep = 8;  // the swizzle's period
  static_assert(kRows == 4 * kWarp && kWarp / kRowChunks * kEach == kWarp, "a lane of the warpgroup finds one row");

  static __device__ int first_row() { return warp_index() % 4 * kWarp; }
  static __device__ int row_of(int i) {
    return lane_index() / kRowChunks + i / (kEach / 2) * (kWarp / kRowChunks) + i % (kEach / 2) * kRowStep;
  }

  const GatherSource& from_;
  int chunk_;       // of every row
  uint32_t first_;  // where the first row's goes, from `to` on
  uint32_t places_[kEach];
};

// The rows that are a k-block, kCount columns of each, which are rows or columns of the tile. A warp copies 16 rows, 8
// lanes a row and panel.
template <Side kSide, int kCount>
class KGather {
 public:
  __device__ KGather(const GatherSource& from, const Tile& tile) : from_(from) { next_slot_ = find(tile, 0); }

  // K-blocks in order.
  __device__ void copy(uint32_t to, const Tile& tile, int k_block) {
    const uint32_t own_place = from_.place_of(next_slot_);
    next_slot_ = find(tile, k_block + 1);  // it has arrived when the next k-block begins
    const int chunk = lane_index() % kRowChunks;
    const int32_t source_chunk = first_of<kSide>(tile) / 8 + chunk;
    const char* from = from_.source + int64_t{source_chunk} * 16;
#pragma unroll
    for (int i = 0; i < kWarpK; i += kWarp / kRowChunks) {
      const int k = i + lane_index() / kRowChunks;
      const uint32_t place = __shfl_sync(kAllLanes, own_place, k);
      const uint32_t row = to + swizzled(first_k() + k, chunk);
#pragma unroll
      for (int panel = 0; panel < kCount / kPanel; ++panel) {
        GatherSource::copy_chunk(row + panel * kPanelBytes, from + panel * kSwizzleBytes, place,
                                 source_chunk + panel * kRowChunks < from_.row_chunks);
      }
    }
  }

 private:
  static constexpr int kWarpK = kBlockK / 4;

  static __device__ int first_k() { return warp_index() % 4 * kWarpK; }

  // The slot of the row that a lane knows; -1: none.
  __device__ int32_t find(const Tile& tile, int k_block) const {
    const int32_t k = tile.k + k_block * kBlockK + first_k() + lane_index() % kWarpK;
    return k < tile.end_k ? from_.slots[k] : -1;
  }

  const GatherSource& from_;
  int32_t next_slot_;
};

}  // namespace anabranch::cuda::hopper
