// Where the factors of a tile come from: each brings the panels of one step (64 terms) to shared memory.
//
// load(): one thread starts copies that complete on `barrier`, which expects the bytes of all panels.
// prefetch(): before the first load. kGathered: instead the four warps of the producer warpgroup copy, see
// GatheredRows.
#pragma once

#include "core/cuda/tma.cuh"
#include "core/cuda/warp.cuh"
#include "experts/hopper/tile.cuh"

namespace anabranch::cuda {

// A of a product over rows: rows of a matrix [R, K], those of other experts zero.
struct Rows {
  static constexpr Major kMajor = Major::k;
  static constexpr bool kGathered = false;
  CUtensorMap map;  // row window, boxes [kRows][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kRows>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step) const {
    load_box(map, to, barrier, WindowCoordinates{tile.term + step * kStepTerms, tile.row, tile.end_row});
  }
};

// B of a product over rows: one expert's weights.
template <Major kMajor_>
struct Weights;

// As stored, [E, K, N].
template <>
struct Weights<Major::mn> {
  static constexpr Major kMajor = Major::mn;
  static constexpr bool kGathered = false;
  CUtensorMap map;  // matrices, boxes [64][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kColumns>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step) const {
#pragma unroll
    for (int panel = 0; panel < kColumns / kPanel; ++panel) {
      load_box(map, to + panel * kPanelBytes, barrier,
               MatrixCoordinates{tile.column + panel * kPanel, tile.term + step * kStepTerms, tile.expert});
    }
  }
};

// Stored transposed, [E, N, K].
template <>
struct Weights<Major::k> {
  static constexpr Major kMajor = Major::k;
  static constexpr bool kGathered = false;
  CUtensorMap map;  // matrices, boxes [kColumns][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kColumns>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step) const {
    load_box(map, to, barrier, MatrixCoordinates{tile.term + step * kStepTerms, tile.column, tile.expert});
  }
};

// A of a product over rows that stand elsewhere: row r of the product is row rows[r] of a matrix [source_rows, K], and
// zero where rows[r] is no row of it.
struct GatheredRows {
  static constexpr Major kMajor = Major::k;
  static constexpr bool kGathered = true;
  const char* source;
  const int32_t* rows;  // [R]
  int32_t source_rows;
  int32_t row_bytes;  // a multiple of 16

  __device__ void prefetch() const {}

  template <int kRows>
  __device__ void load(uint32_t, Barrier&, const Tile&, int) const {}
};

// One thread's part of gathering the rows of a tile. A warp copies 32 rows, 4 at a time, 8 lanes a row.
template <int kRows>
class Gather {
 public:
  __device__ Gather(const GatheredRows& from, const Tile& tile) : from_(from) {
    const int32_t row = tile.row + first_row() + lane_index();
    const int32_t source_row = row < tile.end_row ? __ldg(from.rows + row) : -1;
    source_row_ = source_row < from.source_rows ? source_row : -1;
  }

  // To the panels at `to`; the caller lets its barrier wait for this thread's copies.
  __device__ void copy(uint32_t to, const Tile& tile, int step) const {
    const int chunk = lane_index() % kChunks;
    const int row = lane_index() / kChunks * 8;  // and the 7 rows after it
    const int32_t offset = (tile.term + step * kStepTerms) * 2 + chunk * 16;
    const bool in_row = offset < from_.row_bytes;
#pragma unroll 1  // the producer has few registers
    for (int i = 0; i < 8; ++i) {
      const int32_t source_row = __shfl_sync(kAllLanes, source_row_, row + i);
      const bool real = source_row >= 0 && in_row;
      const char* source = from_.source + (real ? static_cast<int64_t>(source_row) * from_.row_bytes + offset : 0);
      copy_async_16(to + swizzled(first_row() + row + i, chunk), source, real ? 16 : 0);
    }
  }

 private:
  static constexpr int kChunks = kSwizzleBytes / 16;
  static_assert(kRows == 4 * kWarp, "a lane of the warpgroup knows the place of one row");

  static __device__ int first_row() { return warp_index() % 4 * kWarp; }

  const GatheredRows& from_;
  int32_t source_row_;  // of row first_row() + lane_index(); -1: zeros
};

// What the copy engine brings needs no help.
struct NoGather {
  template <class OperandA>
  __device__ NoGather(const OperandA&, const Tile&) {}
  __device__ void copy(uint32_t, const Tile&, int) const {}
};

}  // namespace anabranch::cuda
