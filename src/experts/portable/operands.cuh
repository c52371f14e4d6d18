// GEMM operands in device memory, and their copy to k-blocks in shared memory: 16 bytes at a time from 16-byte aligned
// addresses, else in smaller pieces. Elements out of bounds become zero.
#pragma once

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/keep.cuh"
#include "core/cuda/shared.cuh"
#include "experts/cuda/ops/row_map.h"
#include "experts/cuda/ops/tiles/tile.cuh"
#include "experts/portable/shared_tile.h"

namespace anabranch::cuda::portable {

// Rows of one or more matrices in device memory.
struct MatrixRows {
  const char* data = nullptr;
  int64_t row_bytes = 0;     // from one row to the next; below 2^32
  int64_t matrix_bytes = 0;  // from one expert's matrix to the next; 0: all experts share one matrix
  int32_t copy_bytes = 0;    // 16, 8, 4 or 2: the largest copy to which every row is aligned
};

// Operand A of a GEMM over the rows of groups; its columns are k.
struct RowOperand {
  static constexpr Major kMajor = Major::k;
  MatrixRows rows;
  RowMap map;
  bool gathered = false;  // look up the source row of each assignment in the map
};

// A column in memory, and the number of columns of its part from there on; 0 or less: out of bounds.
struct ColumnPlace {
  int32_t column;
  int32_t left;
};

// Operand B of a GEMM over rows: the weights of an expert. The columns of a tile come from one part of `columns`
// columns, or half of them from the gate and the other half from the same columns of the up part.
template <Major kMajor_>
struct WeightOperand {
  static constexpr Major kMajor = kMajor_;
  MatrixRows rows;
  int32_t columns = 0;       // per part
  int32_t scale = 1;         // columns of a part per column in the scheduler's units
  int32_t part_columns = 0;  // per tile and part: kTileColumns, or half of them
  int32_t part_step = 0;     // distance between a column of the first part and that of the second

  // Finds the n-th column of a tile.
  AB_INLINE ColumnPlace place(const Tile& tile, int n) const {
    const int part = n < part_columns ? 0 : 1;
    const int32_t column = tile.column * scale + n - part * part_columns;
    return {part * part_step + column, columns - column};
  }
};

// An operand of a weight gradient: its rows are k, its columns are rows or columns of the result.
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

// Copies the pieces of kBytes of a chunk that begin before `left` bytes, and writes zeros for the others.
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

// One thread's share of copying the k-blocks of an operand for one tile. copy<kBytes>() copies the next k-block, which
// begins at k, to shared memory at `to`.
//
// K-major operands: in every k-block, a thread copies one chunk of the same rows.
template <class Element, int kSides, int kThreads>
class CopyByK {
  using Place = SharedTile<Major::k, sizeof(Element), kSides>;
  using Plan = CopyPlan<Place, kThreads>;

 public:
  // slots: assignments of the tile's rows, in shared memory; -1: none.
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

  const char* data_;  // the thread's chunk of row 0, one k-block before the next
  uint32_t row_bytes_;
  uint32_t place_;
  int32_t end_k_;
  int32_t sources_[Plan::kPasses];  // source rows of the thread's chunks; -1: none
};

// MN-major operands: in every k-block, a thread copies the same columns of another row.
template <class Operand, class Element, int kSides, int kThreads>
class CopyByMn {
  static constexpr bool kMayGather = requires(const Operand& operand) { operand.gathered; };
  using Place = SharedTile<Major::mn, sizeof(Element), kSides>;
  using Plan = CopyPlan<Place, kThreads>;
  static constexpr int kHalf = Plan::kPasses / 2;  // passes per half of the tile's columns

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

  // Must be called for consecutive k-blocks.
  template <int kBytes>
  __device__ __forceinline__ void copy(uint32_t to, int32_t k) {
    const int32_t row = k + Plan::row(thread(), 0);
    bool in_bounds = row < end_k_;
    int64_t offset = offset_;
    if constexpr (kMayGather) {
      if (operand_.gathered) {
        const int32_t slot = operand_.map.checked(slot_);
        in_bounds = slot >= 0;
        offset = operand_.map.source_of(max(slot, 0)) * operand_.rows.row_bytes;
        find(k + kDepth<Element>);  // the load completes by the next k-block
      }
    }
    offset_ += kDepth<Element> * operand_.rows.row_bytes;
#pragma unroll
    for (int pass = 0; pass < Plan::kPasses; ++pass) {
      const int half = pass / kHalf;
      // Bytes of this thread's half that earlier passes copied.
      const int before = pass % kHalf * Plan::kChunkStep * kChunkBytes;
      copy_chunk<kBytes>(to + Place::chunk(Plan::row(thread(), 0), Plan::chunk(thread(), pass)),
                         from_[half] + offset + before, in_bounds ? left_[half] - before : 0);
    }
  }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }

  // Starts to load the assignment of the thread's row in the k-block that begins at k, without waiting for it.
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
  int32_t slot_ = -1;    // of the thread's row in the next k-block, unchecked
  int64_t offset_;       // of the thread's row, if rows are not gathered
  const char* from_[2];  // row 0 of the thread's first column in each half of the tile
  int32_t left_[2];      // bytes available from there on
};

// Packed weights (packed_operand.cuh). Their copy is followed by decode(), which a thread calls when its copies have
// arrived.
template <class Operand>
constexpr bool kIsPacked = requires { typename Operand::Format; };

template <class Operand, class Element, int kSides, int kThreads>
struct CopyOf {
  using type = CopyByMn<Operand, Element, kSides, kThreads>;
};
template <class Operand, class Element, int kSides, int kThreads>
  requires(Operand::kMajor == Major::k && !kIsPacked<Operand>)
struct CopyOf<Operand, Element, kSides, kThreads> {
  using type = CopyByK<Element, kSides, kThreads>;
};
template <class Operand, class Element, int kSides, int kThreads>
using Copy = typename CopyOf<Operand, Element, kSides, kThreads>::type;

}  // namespace anabranch::cuda::portable
