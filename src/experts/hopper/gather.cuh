// Gathered operands: the producer warpgroup copies their rows, 16 bytes per thread and copy (cp.async).
#pragma once

#include <cstdint>

#include "core/cuda/divisor.h"
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

  // Copies a chunk of the row at `place`, which is in bounds, or writes zeros without reading if in_bounds is false. In
  // PTX the address takes two instructions less than in C++, where the compiler sums its terms in another order.
  static __device__ __forceinline__ void copy_valid_chunk(uint32_t to, const char* from, uint32_t place,
                                                          bool in_bounds) {
    const char* chunk;
    asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(chunk) : "r"(place), "l"(from));
    copy_async_16(to, chunk, in_bounds);
  }
};

// An operand's Gather class is one thread's share of copying the panels of a tile's k-blocks. copy() starts the copies
// to the panels at `to`; the caller makes its barrier wait for them. NoGather: the operand is loaded by TMA.
struct NoGather {
  template <class Operand>
  __device__ NoGather(const Operand&, const Tile&) {}
  __device__ void copy(uint32_t, const Tile&, int) const {}
};

// The rows of a tile that a lane copies for a K-major operand: where they begin in the matrix, and where they go in a
// stage. A warp copies a quarter of the rows with 8 lanes per row. Lane i copies rows i / 8 + 8 j and i / 8 + 4 + 8 j,
// so it needs only two swizzle patterns.
template <int kRows>
class RowPlaces {
 protected:
  // no_row: the place of rows that are out of range.
  __device__ __forceinline__ RowPlaces(const GatherSource& from, const Tile& tile, uint32_t no_row)
      : first_(swizzled(first_row() + row_of(0), chunk())) {
    uint32_t places[kWarpRows / kWarp];
#pragma unroll
    for (int i = 0; i < kWarpRows / kWarp; ++i) {
      const int32_t row = tile.row + first_row() + i * kWarp + lane_index();
      places[i] = row < tile.end_row ? from.place_of(from.slot_of(row)) : GatherSource::kOutOfBounds;
      if (places[i] == GatherSource::kOutOfBounds) places[i] = no_row;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      constexpr int kEachOfWarp = kWarp / kRowStep;  // rows of a lane and pattern among those that a look-up finds
      places_[i] = __shfl_sync(kAllLanes, places[i % (kEach / 2) / kEachOfWarp], row_of(i) % kWarp);
    }
  }

  // Whether nothing multiplies the panel of the warp's rows.
  static __device__ bool is_outside(const Tile& tile) {
    return kWarpRows >= kPanel && tile.row + first_row() >= tile.end_row;
  }

  // Calls copy(to, place) for the lane's rows. to: the address of its chunk in the panels at `stage`.
  template <class Copy>
  __device__ __forceinline__ void for_rows(uint32_t stage, const Copy& copy) const {
    // Four rows further down, the swizzle flips one bit of the chunk index.
    const uint32_t firsts[] = {stage + first_, stage + (first_ ^ 4 * 16) + 4 * kSwizzleBytes};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      copy(firsts[i / (kEach / 2)] + i % (kEach / 2) * kRowStep * kSwizzleBytes, places_[i]);
    }
  }

  static __device__ int chunk() { return lane_index() % kRowChunks; }  // in every row

 private:
  static constexpr int kWarpRows = kRows / 4;
  static constexpr int kEach = kWarpRows / (kWarp / kRowChunks);  // rows per lane
  static constexpr int kRowStep = 8;                              // period of the swizzle
  static_assert(kWarpRows % kWarp == 0, "each lane of the warpgroup looks up the same number of rows");

  static __device__ int first_row() { return warp_index() % 4 * kWarpRows; }
  static __device__ int row_of(int i) {
    return lane_index() / kRowChunks + i / (kEach / 2) * (kWarp / kRowChunks) + i % (kEach / 2) * kRowStep;
  }

  uint32_t first_;  // offset of the first row's chunk from the stage
  uint32_t places_[kEach];
};

// Gathers the rows of a tile. Rows out of range are zeros.
template <int kRows>
class RowGather : RowPlaces<kRows> {
 public:
  __device__ RowGather(const GatherSource& from, const Tile& tile)
      : RowPlaces<kRows>(from, tile, GatherSource::kOutOfBounds), from_(from) {}

  __device__ void copy(uint32_t to, const Tile& tile, int k_block) const {
    if (this->is_outside(tile)) return;
    const int32_t source_chunk = (tile.k + k_block * kBlockK) / 8 + this->chunk();
    const bool in_bounds = source_chunk < from_.row_chunks;
    const char* from = from_.source + int64_t{source_chunk} * 16;
    this->for_rows(to, [&](uint32_t at, uint32_t place) { GatherSource::copy_chunk(at, from, place, in_bounds); });
  }

 private:
  const GatherSource& from_;
};

// Gathers the rows of a tile that begins at k = 0. Rows out of range are clamped to row 0, which saves an instruction
// per copy. If the matrix has no rows, nothing is copied.
template <int kRows>
class ClampedRowGather : RowPlaces<kRows> {
 public:
  __device__ ClampedRowGather(const GatherSource& from, const Tile& tile)
      : RowPlaces<kRows>(from, tile, 0),
        from_(from.source + this->chunk() * 16),
        left_(from.source_rows == 0 || this->is_outside(tile) ? -1 : from.row_chunks - this->chunk()) {}

  __device__ void copy(uint32_t to, const Tile&, int k_block) const {
    if (left_ < 0) return;
    const char* from = from_ + k_block * kSwizzleBytes;
    const bool in_bounds = left_ > k_block * kRowChunks;
    this->for_rows(to,
                   [&](uint32_t at, uint32_t place) { GatherSource::copy_valid_chunk(at, from, place, in_bounds); });
  }

 private:
  const char* from_;  // the lane's chunk of row 0
  int32_t left_;      // chunks of a row from the lane's on; -1: nothing to copy
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
