// Gathered operands: the producer warpgroup copies their rows, 16 bytes per thread and copy (cp.async).
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/cuda/divisor.h"
#include "core/cuda/keep.cuh"
#include "core/cuda/tile_memory.cuh"
#include "core/cuda/warp.cuh"
#include "experts/hopper/tile_shape.cuh"

namespace anabranch::cuda::hopper {

constexpr int kRowChunks = kSwizzleBytes / 16;  // per row of a panel

// Source of gathered rows: row r is row slots[r] / slots_per_row of a matrix with source_rows rows, or zero if that is
// out of range. Without slots, row r is the matrix's row r. Positions in the matrix are counted in 16-byte chunks.
struct GatherSource {
  const char* source;
  const int32_t* slots;  // [R], or nullptr
  Divisor slots_per_row;
  int32_t source_rows;
  int32_t row_chunks;  // all rows together have fewer than 2^32 - 1

  static constexpr uint32_t kOutOfBounds = 0xffffffffu;

  __device__ int32_t slot_of(int32_t row) const { return slots == nullptr ? row : slots[row]; }

  // Returns the first chunk of the row of an assignment.
  __device__ uint32_t place_of(int32_t slot) const {
    const int32_t row = slots_per_row.quotient(slot);
    const bool in_bounds = slot >= 0 && row < source_rows;
    return in_bounds ? static_cast<uint32_t>(row) * static_cast<uint32_t>(row_chunks) : kOutOfBounds;
  }

  // Copies a chunk of the row at `place`, or writes zeros without reading if it is out of bounds. from: that chunk of
  // row 0.
  static __device__ __forceinline__ void copy_chunk(uint32_t to, const char* from, uint32_t place, bool in_bounds) {
    copy_async_16(to, from + static_cast<uint64_t>(place) * 16, in_bounds && place != kOutOfBounds);
  }

  // The address of a chunk of the row at `place`. from: that chunk of row 0. In PTX it takes two instructions less than
  // in C++, where the compiler sums its terms in another order.
  static __device__ __forceinline__ uint64_t address_of(const char* from, uint32_t place) {
    uint64_t address;
    asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(address) : "r"(place), "l"(from));
    return address;
  }
};

// An operand's Gather class is one thread's share of copying the panels of a tile's k-blocks. copy() starts the copies
// to the panels at `to`; the caller makes its barrier wait for them. Its second argument: whether the warpgroup also
// decodes or copies the other operand, so that it has fewer registers. NoGather: the operand is loaded by TMA.
struct NoGather {
  template <class Operand>
  __device__ NoGather(const Operand&, const Tile&) {}
  __device__ void copy(uint32_t, const Tile&, int) const {}
};

// Gathers the rows of a tile. Rows out of range are zeros.
//
// A warp copies a quarter of the rows with 8 lanes per row. Lane i copies rows i / 8 + 8 j and i / 8 + 4 + 8 j, so it
// needs only two swizzle patterns.
template <int kRows>
class RowGather {
 public:
  __device__ RowGather(const GatherSource& from, const Tile& tile)
      : from_(from), first_(swizzled(first_row() + row_of(0), chunk())) {
    uint32_t places[kWarpRows / kWarp];
#pragma unroll
    for (int i = 0; i < kWarpRows / kWarp; ++i) {
      const int32_t row = tile.row + first_row() + i * kWarp + lane_index();
      places[i] = row < tile.end_row ? from.place_of(from.slot_of(row)) : GatherSource::kOutOfBounds;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      constexpr int kEachOfWarp = kWarp / kRowStep;  // rows of a lane and pattern among those that a look-up finds
      places_[i] = __shfl_sync(kAllLanes, places[i % (kEach / 2) / kEachOfWarp], row_of(i) % kWarp);
    }
  }

  __device__ void copy(uint32_t to, const Tile& tile, int k_block) const {
    // Nothing multiplies the panel of the warp's rows.
    if (kWarpRows >= kPanel && tile.row + first_row() >= tile.end_row) return;
    const int32_t source_chunk = (tile.k + k_block * kBlockK) / 8 + chunk();
    const bool in_bounds = source_chunk < from_.row_chunks;
    const char* from = from_.source + int64_t{source_chunk} * 16;
    // Four rows further down, the swizzle flips one bit of the chunk index.
    const uint32_t firsts[] = {to + first_, to + (first_ ^ 4 * 16) + 4 * kSwizzleBytes};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      GatherSource::copy_chunk(firsts[i / (kEach / 2)] + i % (kEach / 2) * kRowStep * kSwizzleBytes, from, places_[i],
                               in_bounds);
    }
  }

 private:
  static constexpr int kWarpRows = kRows / 4;
  static constexpr int kEach = kWarpRows / (kWarp / kRowChunks);  // rows per lane
  static constexpr int kRowStep = 8;                              // period of the swizzle
  static_assert(kWarpRows % kWarp == 0, "each lane of the warpgroup looks up the same number of rows");

  static __device__ int chunk() { return lane_index() % kRowChunks; }  // in every row
  static __device__ int first_row() { return warp_index() % 4 * kWarpRows; }
  static __device__ int row_of(int i) {
    return lane_index() / kRowChunks + i / (kEach / 2) * (kWarp / kRowChunks) + i % (kEach / 2) * kRowStep;
  }

  const GatherSource& from_;
  uint32_t first_;  // offset of the first row's chunk from the stage
  uint32_t places_[kEach];
};

// Gathers the rows of a tile that begins at k = 0. Rows out of range are clamped to row 0, which saves an instruction
// per copy; panels without rows are left out. If the matrix has no rows, nothing is copied.
//
// A warp copies 16 rows of each panel, with 8 lanes per row: lane i the rows i / 8 + 4 j, j = 0 ... 3. Each of the 8
// lanes looks up some of these rows. kShuffles: it keeps only those places, and takes the others from their lanes for
// each k-block, which needs fewer registers.
template <int kRows, bool kShuffles>
class ClampedRowGather {
 public:
  __device__ ClampedRowGather(const GatherSource& from, const Tile& tile) : from_(from) {
    uint32_t thread = threadIdx.x;
    keep(thread);  // else there are not enough registers for what the tiles have in common
    const auto chunk = static_cast<int>(thread % kRowChunks);  // in every row
    uint32_t places[kLookUps];
#pragma unroll
    for (int i = 0; i < kLookUps; ++i) {
      const int32_t row = tile.row + row_of(thread, i * kRowChunks + chunk);
      places[i] = row < tile.end_row ? from.place_of(from.slot_of(row)) : GatherSource::kOutOfBounds;
      if (places[i] == GatherSource::kOutOfBounds) places[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) places_[i] = kShuffles ? places[i] : place(places, i);
    left_ = from.row_chunks - chunk;
    panels_ = from.source_rows == 0 ? 0 : min((tile.end_row - tile.row + kPanel - 1) / kPanel, kPanels);
    first_ = swizzled(row_of(thread, 0), chunk);
  }

  __device__ void copy(uint32_t to, const Tile&, int k_block) const {
    const char* from = from_.source + k_block * kSwizzleBytes;
    const int32_t left = left_ - k_block * kRowChunks;
    // Four rows further down, the swizzle flips one bit of the chunk index.
    const uint32_t firsts[] = {to + first_, to + (first_ ^ 4 * 16) + 4 * kSwizzleBytes};
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (panel >= panels_) return;
      uint64_t chunks[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int n = panel * kEach + i;
        chunks[i] = GatherSource::address_of(from, kShuffles ? place(places_, n) : places_[n]);
      }
      // Addresses are multiples of 16, so this is zero. It makes the compiler compute all of them before the first
      // copy: a register is not free until the copy that it is the address of has started.
      const auto zero = static_cast<int32_t>((chunks[0] | chunks[1] | chunks[2] | chunks[3]) & 15u);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        copy_async_16(firsts[i % 2] + panel * kPanelBytes + i / 2 * 8 * kSwizzleBytes,
                      reinterpret_cast<const char*>(chunks[i]), left > zero);
      }
    }
  }

 private:
  static constexpr int kPanels = kRows / kPanel;
  static constexpr int kEach = 4;                                             // rows of a lane and panel
  static constexpr int kLookUps = std::max(kPanels * kEach / kRowChunks, 1);  // per lane; not all used if one panel
  static constexpr int kPlaces = kShuffles ? kLookUps : kPanels * kEach;

  // A thread's n-th row in the tile.
  static __device__ int row_of(uint32_t thread, int n) {
    const auto warp = static_cast<int>(thread / kWarp % 4), group = static_cast<int>(thread % kWarp / kRowChunks);
    return n / kEach * kPanel + warp * (kPanel / 4) + group + n % kEach * 4;
  }
  // The place of the lane's chunk of that row, which another lane has looked up.
  static __device__ __forceinline__ uint32_t place(const uint32_t* places, int n) {
    const uint32_t first = __shfl_sync(kAllLanes, places[n / kRowChunks], n % kRowChunks, kRowChunks);
    return first + threadIdx.x % kRowChunks;
  }

  const GatherSource& from_;
  int32_t left_;    // chunks of a row from the lane's on
  int32_t panels_;  // with rows
  uint32_t first_;  // offset of the first row's chunk from the stage
  uint32_t places_[kPlaces];
};

// Gathers rows as the k dimension (MN-major operands): a k-block of rows with kCount columns each, which are rows or
// columns of the tile. A warp copies 16 rows, with 8 lanes per row and panel. Its lanes look up the rows of two
// k-blocks at once, two to three k-blocks ahead, because a look-up takes longer than a k-block.
template <Side kSide, int kCount>
class KGather {
 public:
  __device__ KGather(const GatherSource& from, const Tile& tile) : from_(from) {
    const int32_t slot = find(tile, 0);
    next_slot_ = find(tile, 2);
    place_ = from_.place_of(slot);
  }

  // Must be called for consecutive k-blocks, from 0 on.
  __device__ void copy(uint32_t to, const Tile& tile, int k_block) {
    const int first_lane = k_block % 2 * kWarpK;
    const int chunk = lane_index() % kRowChunks;
    const int32_t source_chunk = first_of<kSide>(tile) / 8 + chunk;
    const char* from = from_.source + int64_t{source_chunk} * 16;
#pragma unroll
    for (int i = 0; i < kWarpK; i += kWarp / kRowChunks) {
      const int k = i + lane_index() / kRowChunks;
      const uint32_t place = __shfl_sync(kAllLanes, place_, first_lane + k);
      const uint32_t row = to + swizzled(first_k() + k, chunk);
#pragma unroll
      for (int panel = 0; panel < kCount / kPanel; ++panel) {
        GatherSource::copy_chunk(row + panel * kPanelBytes, from + panel * kSwizzleBytes, place,
                                 source_chunk + panel * kRowChunks < from_.row_chunks);
      }
    }
    if (k_block % 2 == 1) {
      place_ = from_.place_of(next_slot_);
      next_slot_ = find(tile, k_block + 3);
    }
  }

 private:
  static constexpr int kWarpK = kBlockK / 4;

  static __device__ int first_k() { return warp_index() % 4 * kWarpK; }

  // The assignment of the row that this lane looks up for k-block `first` or first + 1; -1: none.
  __device__ int32_t find(const Tile& tile, int first) const {
    const int32_t k = tile.k + (first + lane_index() / kWarpK) * kBlockK + first_k() + lane_index() % kWarpK;
    return k < tile.end_k ? from_.slots[k] : -1;
  }
  static_assert(2 * kWarpK == kWarp, "a warp looks up the rows of two k-blocks");

  const GatherSource& from_;
  uint32_t place_;
  int32_t next_slot_;
};

}  // namespace anabranch::cuda::hopper
