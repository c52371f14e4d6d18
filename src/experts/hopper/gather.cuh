// Operands whose rows stand elsewhere: the producer warpgroup copies them, 16 bytes a thread (cp.async).
#pragma once

#include <cstdint>

#include "core/cuda/divisor.h"
#include "core/cuda/tile_memory.cuh"
#include "core/cuda/warp.cuh"
#include "experts/hopper/tile.cuh"

namespace anabranch::cuda {

constexpr int kRowChunks = kSwizzleBytes / 16;  // of a row of a panel

// Rows that stand elsewhere: row r is row slots[r] / slots_per_row of a matrix of so many rows, and zero where that is
// none of them.
struct RowsElsewhere {
  const char* source;
  const int32_t* slots;  // [R]
  Divisor slots_per_row;
  int32_t source_rows;
  int32_t row_bytes;  // a multiple of 16

  // The row of the source; -1: none.
  __device__ int32_t row_of(int32_t slot) const {
    const int32_t source_row = slots_per_row.quotient(slot);
    return slot >= 0 && source_row < source_rows ? source_row : -1;
  }

  // From byte `offset` of a row on, 16 bytes for each of kPanels panels; zeros outside of the matrix.
  template <int kPanels>
  __device__ void copy_chunks(uint32_t to, int32_t source_row, int32_t offset) const {
    const char* chunk = source + (static_cast<int64_t>(max(source_row, 0)) * row_bytes + offset);
    const int32_t left = source_row >= 0 ? row_bytes - offset : 0;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      copy_async_16(to + panel * kPanelBytes, chunk + panel * kSwizzleBytes, left > panel * kSwizzleBytes ? 16 : 0);
    }
  }
};

// An operand's Gather is one thread's part of copying the panels of a tile's steps. copy() begins copies to the panels
// at `to`; the caller lets its barrier wait for this thread's copies. What the copy engine brings needs none.
struct NoGather {
  template <class Operand>
  __device__ NoGather(const Operand&, const Tile&) {}
  __device__ void copy(uint32_t, const Tile&, int) const {}
};

// Rows of a tile, 64 terms of each. A warp copies 32 rows, 4 at a time, 8 lanes a row.
template <int kRows>
class RowGather {
 public:
  __device__ RowGather(const RowsElsewhere& from, const Tile& tile) : from_(from) {
    const int32_t row = tile.row + first_row() + lane_index();
    source_row_ = row < tile.end_row ? from.row_of(__ldg(from.slots + row)) : -1;
  }

  __device__ void copy(uint32_t to, const Tile& tile, int step) const {
    const int chunk = lane_index() % kRowChunks;
    const int row = lane_index() / kRowChunks * 8;  // and the 7 rows after it
    const int32_t offset = (tile.term + step * kStepTerms) * 2 + chunk * 16;
#pragma unroll 1  // the producer has few registers
    for (int i = 0; i < 8; ++i) {
      const int32_t source_row = __shfl_sync(kAllLanes, source_row_, row + i);
      from_.copy_chunks<1>(to + swizzled(first_row() + row + i, chunk), source_row, offset);
    }
  }

 private:
  static_assert(kRows == 4 * kWarp, "a lane of the warpgroup knows the place of one row");

  static __device__ int first_row() { return warp_index() % 4 * kWarp; }

  const RowsElsewhere& from_;
  int32_t source_row_;  // of row first_row() + lane_index()
};

// 64 terms of a step, kCount columns of each, which are rows or columns of the tile. A warp copies 16 terms, 4 at a
// time, 8 lanes a term and panel.
template <Side kSide, int kCount>
class TermGather {
 public:
  __device__ TermGather(const RowsElsewhere& from, const Tile& tile) : from_(from) { next_slot_ = find(tile, 0); }

  // Steps in order.
  __device__ void copy(uint32_t to, const Tile& tile, int step) {
    const int32_t own_row = from_.row_of(next_slot_);
    next_slot_ = find(tile, step + 1);  // it has arrived when the next step begins
    const int chunk = lane_index() % kRowChunks;
    const int32_t offset = first_of<kSide>(tile) * 2 + chunk * 16;
#pragma unroll 1  // the producer has few registers
    for (int i = lane_index() / kRowChunks; i < kWarpTerms; i += kWarp / kRowChunks) {
      const int32_t source_row = __shfl_sync(kAllLanes, own_row, i);
      from_.copy_chunks<kCount / kPanel>(to + swizzled(first_term() + i, chunk), source_row, offset);
    }
  }

 private:
  static constexpr int kWarpTerms = kStepTerms / 4;

  static __device__ int first_term() { return warp_index() % 4 * kWarpTerms; }

  // The slot of the term that a lane knows the row of; -1: none.
  __device__ int32_t find(const Tile& tile, int step) const {
    const int32_t term = tile.term + step * kStepTerms + first_term() + lane_index() % kWarpTerms;
    return term < tile.end_term ? __ldg(from_.slots + term) : -1;
  }

  const RowsElsewhere& from_;
  int32_t next_slot_;
};

}  // namespace anabranch::cuda
