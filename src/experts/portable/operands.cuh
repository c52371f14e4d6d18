// Where the operands of a GEMM lie in device memory, and how a block copies their k-blocks to shared memory: 16
// bytes at a time from addresses that are multiples of 16, else in smaller pieces. What is not there is zero.
#pragma once

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/keep.cuh"
#include "core/cuda/shared.cuh"
#include "experts/cuda/ops/row_map.h"
#include "experts/cuda/ops/tiles/tile.cuh"
#include "experts/portable/shared_tile.h"

namespace anabranch::cuda::portable {

// Rows of matrices in memory.
struct MatrixRows {
  const char* data = nullptr;
  int64_t row_bytes = 0;     // from one row to the next; below 2^32
  int64_t matrix_bytes = 0;  // from one expert's rows to the next one's; 0: there is one matrix
  int32_t copy_bytes = 0;    // 16, 8, 4 or 2: by which every row can be copied
};

// Operand A of a product over the rows of groups; k are columns.
struct RowOperand {
  static constexpr Major kMajor = Major::k;
  MatrixRows rows;
  RowMap map;
  bool gathered = false;  // the row of a slot stands where the map says
};

// A column in memory, and how many there are from it on: of its part, 0 and less: it is none.
struct ColumnPlace {
  int32_t column;
  int32_t left;
};

// Operand B of it, an expert's weights. A tile's columns are those of one part of `columns` columns; or half of them
// are the gate's, the other half the same columns of the up part.
template <Major kMajor_>
struct WeightOperand {
  static constexpr Major kMajor = kMajor_;
  MatrixRows rows;
  int32_t columns = 0;       // of a part
  int32_t scale = 1;         // columns of a part for each by which tiles are counted
  int32_t part_columns = 0;  // of a tile: kTileColumns, or half of them
  int32_t part_step = 0;     // from a column of the first part to that of the second

  // Where the n-th column of a tile stands.
  AB_INLINE ColumnPlace place(const Tile& tile, int n) const {
    const int part = n < part_columns ? 0 : 1;
    const int32_t column = tile.column * scale + n - part * part_columns;
    return {part * part_step + column, columns - column};
  }
};

// An operand of a gradient of weights: rows are the k dimension, their columns rows or columns of the result.
template <Side kSide_>
struct SumOperand {
  static constexpr Major kMajor = Major::mn;
  static constexpr Side kSide = kSide_;
  MatrixRows rows;
  RowMap map;
  bool gathered = false;
  int32_t columns = 0;

  AB_INLINE ColumnPlace place(const Tile& tile, int n) const {
    const int32_t column = (kSide == Side::rows ? tile.row : tile.column) + n;
    return {column, columns - column};
  }
};

// A chunk, or its first pieces of kBytes, as far as they begin before `left` bytes, and zeros for the rest.
template <int kBytes>
__device__ __forceinline__ void copy_chunk(uint32_t to, const char* from, int left) {
  if constexpr (kBytes == 16) {
    copy_async_16(to, from, left > 0);
  } else if constexpr (kBytes >= 4) {
#pragma unroll
    for (int i = 0; i < kChunkBytes; i += kBytes) {
      copy_async<kBytes>(to + static_cast<uint32_t>(i), from + i, i < left);
    }
  } else {
    uint32_t words[kChunkBytes / 4];
#pragma unroll
    for (int i = 0; i < kChunkBytes / 4; ++i) {
      const auto* const elements = reinterpret_cast<const uint16_t*>(from + i * 4);
      uint16_t low = 0;
      uint16_t high = 0;
      if (i * 4 < left) low = __ldca(elements);
      if (i * 4 + 2 < left) high = __ldca(elements + 1);
      words[i] = low | static_cast<uint32_t>(high) << 16;
    }
    store_shared(to, uint4{words[0], words[1], words[2], words[3]});
  }
}

template <class Element, class F>
__device__ __forceinline__ void with_bytes(int bytes, const F& f) {
  if (bytes == 16) return f.template operator()<16>();
  if (bytes == 8) return f.template operator()<8>();
  if (sizeof(Element) == 4 || bytes == 4) return f.template operator()<4>();
  if constexpr (sizeof(Element) == 2) f.template operator()<2>();
}

// One thread's part of copying an operand's k-blocks, made for a tile. copy<kBytes>(): the next one, from k on, to
// shared memory at `to`.
//
// Operands whose k is next to next: a thread has a chunk of the same rows in every k-block.
template <class Element, int kSides, int kThreads>
class CopyByK {
  using Place = SharedTile<Major::k, sizeof(Element), kSides>;
  using Plan = CopyPlan<Place, kThreads>;

 public:
  // slots: of the tile's rows, in shared memory; -1: none.
  __device__ CopyByK(const RowOperand& from, const Tile& tile, const int32_t* slots) {
    begin(from.rows, tile, [&](int row) {
      const int32_t slot = slots[row];
      if (slot < 0) return -1;
      return from.gathered ? from.map.source_of(slot) : tile.row + row;
    });
  }
  __device__ CopyByK(const WeightOperand<Major::k>& from, const Tile& tile, const int32_t*) {
    begin(from.rows, tile, [&](int n) {
      const auto place = from.place(tile, n);
      return place.left > 0 ? place.column : -1;
    });
  }

  template <int kBytes>
  __device__ __forceinline__ void copy(uint32_t to, int32_t k) {
    const int32_t column = k + Plan::chunk(thread(), 0) * kChunk<Element>;
    const int left = min(end_k_ - column, kChunk<Element>) * static_cast<int>(sizeof(Element));
    data_ += kDepthBytes;
    keep(data_);
#pragma unroll
    for (int pass = 0; pass < Plan::kPasses; ++pass) {
      copy_chunk<kBytes>(to + place_ + static_cast<uint32_t>(pass * Plan::kRowStep * kDepthBytes),
                         data_ + uint64_t{static_cast<uint32_t>(sources_[pass])} * row_bytes_,
                         sources_[pass] >= 0 ? left : 0);
    }
  }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }

  template <class SourceOf>
  __device__ __forceinline__ void begin(const MatrixRows& rows, const Tile& tile, const SourceOf& source_of) {
    row_bytes_ = static_cast<uint32_t>(rows.row_bytes);
    const int chunk = Plan::chunk(thread(), 0);
    const int64_t column = int64_t{tile.k} + chunk * kChunk<Element>;
    data_ = rows.data + max(tile.expert, 0) * rows.matrix_bytes + column * int64_t{sizeof(Element)} - kDepthBytes;
    end_k_ = tile.end_k;
    place_ = Place::chunk(Plan::row(thread(), 0), chunk);  // the same chunk of every kRowStep-th row
    keep(place_);
#pragma unroll
    for (int pass = 0; pass < Plan::kPasses; ++pass) sources_[pass] = source_of(Plan::row(thread(), pass));
  }

  const char* data_;  // the thread's chunk of row 0 of the k-block before the next one
  uint32_t row_bytes_;
  uint32_t place_;
  int32_t end_k_;
  int32_t sources_[Plan::kPasses];  // the rows of the thread's chunks; -1: none
};

// Operands whose sides are next to next: a thread has the same columns of another row in every k-block.
template <class Operand, class Element, int kSides, int kThreads>
class CopyByMn {
  static constexpr bool kMayGather = requires(const Operand& operand) { operand.gathered; };
  using Place = SharedTile<Major::mn, sizeof(Element), kSides>;
  using Plan = CopyPlan<Place, kThreads>;
  static constexpr int kHalf = Plan::kPasses / 2;  // passes of a half of the tile's columns

 public:
  __device__ CopyByMn(const Operand& from, const Tile& tile, const int32_t*) : operand_(from), end_k_(tile.end_k) {
    offset_ = (tile.k + Plan::row(thread(), 0)) * from.rows.row_bytes;
    const char* const data = from.rows.data + max(tile.expert, 0) * from.rows.matrix_bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ColumnPlace place = from.place(tile, Plan::chunk(thread(), half * kHalf) * kChunk<Element>);
      from_[half] = data + place.column * int64_t{sizeof(Element)};
      left_[half] = min(max(place.left, 0), kSides) * static_cast<int>(sizeof(Element));
    }
    find(tile.k);
  }

  // k-blocks in order.
  template <int kBytes>
  __device__ __forceinline__ void copy(uint32_t to, int32_t k) {
    const int32_t row = k + Plan::row(thread(), 0);
    bool is_there = row < end_k_;
    int64_t offset = offset_;
    if constexpr (kMayGather) {
      if (operand_.gathered) {
        const int32_t slot = operand_.map.checked(slot_);
        is_there = slot >= 0;
        offset = operand_.map.source_of(max(slot, 0)) * operand_.rows.row_bytes;
        find(k + kDepth<Element>);  // it has arrived when the next k-block begins
      }
    }
    offset_ += kDepth<Element> * operand_.rows.row_bytes;
#pragma unroll
    for (int pass = 0; pass < Plan::kPasses; ++pass) {
      const int half = pass / kHalf;
      const int before = pass % kHalf * Plan::kChunkStep * kChunkBytes;  // of the thread's bytes of the half
      copy_chunk<kBytes>(to + Place::chunk(Plan::row(thread(), 0), Plan::chunk(thread(), pass)),
                         from_[half] + offset + before, is_there ? left_[half] - before : 0);
    }
  }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }

  // Reads the slot of the thread's row of the k-block from k on; nothing here waits for it.
  __device__ __forceinline__ void find(int32_t k) {
    if constexpr (kMayGather) {
      if (!operand_.gathered) return;
      const int32_t row = k + Plan::row(thread(), 0);
      slot_ = -1;
      if (row < end_k_) slot_ = operand_.map.slots[row];
    }
  }

  const Operand& operand_;
  int32_t end_k_;
  int32_t slot_ = -1;    // of the thread's row of the next k-block, as it stands in memory
  int64_t offset_;       // of the thread's row, where rows are not gathered
  const char* from_[2];  // row 0 of the thread's first column in either half of the tile's
  int32_t left_[2];      // bytes that there are from it on
};

template <class Operand, class Element, int kSides, int kThreads>
struct CopyOf {
  using type = CopyByMn<Operand, Element, kSides, kThreads>;
};
template <class Operand, class Element, int kSides, int kThreads>
  requires(Operand::kMajor == Major::k)
struct CopyOf<Operand, Element, kSides, kThreads> {
  using type = CopyByK<Element, kSides, kThreads>;
};
template <class Operand, class Element, int kSides, int kThreads>
using Copy = typename CopyOf<Operand, Element, kSides, kThreads>::type;

}  // namespace anabranch::cuda::portable
