// Where the factors of a product stand in device memory, and how a block copies their k-blocks to shared memory: 16
// bytes at a time from addresses that are multiples of 16, else in smaller pieces. What is not there is zero.
#pragma once

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/shared.cuh"
#include "experts/cuda/row_map.h"
#include "experts/cuda/tiles/tile.cuh"
#include "experts/portable/shared_tile.h"

namespace anabranch::cuda::portable {

// Rows of matrices in memory.
struct MatrixRows {
  const char* data = nullptr;
  int64_t row_bytes = 0;     // from one row to the next
  int64_t matrix_bytes = 0;  // from one expert's rows to the next one's; 0: there is one matrix
  int32_t copy_bytes = 0;    // 16, 8, 4 or 2: by which every row can be copied
};

// Factor A of a product over the rows of groups; k are columns.
struct RowFactor {
  static constexpr Major kMajor = Major::k;
  MatrixRows rows;
  RowMap map;
  bool gathered = false;  // the row of a slot stands where the map says
};

// Factor B of it, an expert's weights. A tile's columns are those of one part of `columns` columns; or half of them are
// the gate's, the other half the same columns of the up part.
template <Major kMajor_>
struct WeightFactor {
  static constexpr Major kMajor = kMajor_;
  MatrixRows rows;
  int32_t columns = 0;       // of a part
  int32_t scale = 1;         // columns of a part for each by which tiles are counted
  int32_t part_columns = 0;  // of a tile: kTileColumns, or half of them
  int32_t part_step = 0;     // from a column of the first part to that of the second

  // Where the n-th column of a tile stands; `left`: how many of its part there are from it on.
  struct Place {
    int32_t column;
    int32_t left;
  };
  AB_INLINE Place place(const Tile& tile, int n) const {
    const int part = n < part_columns ? 0 : 1;
    const int32_t column = tile.column * scale + n - part * part_columns;
    return {part * part_step + column, columns - column};
  }
};

// A factor of a gradient of weights: rows are the k dimension, their columns rows or columns of the result.
template <Side kSide_>
struct SumFactor {
  static constexpr Major kMajor = Major::mn;
  static constexpr Side kSide = kSide_;
  MatrixRows rows;
  RowMap map;
  bool gathered = false;
  int32_t columns = 0;
};

// The first `valid` bytes of a chunk and zeros for the rest.
template <int kBytes>
__device__ __forceinline__ void copy_chunk(uint32_t to, const char* from, int valid) {
  if constexpr (kBytes == 16) {
    copy_async_16(to, from, static_cast<uint32_t>(valid));
  } else if constexpr (kBytes >= 4) {
#pragma unroll
    for (int i = 0; i < kChunkBytes; i += kBytes) {
      copy_async<kBytes>(to + static_cast<uint32_t>(i), from + i,
                         static_cast<uint32_t>(min(max(valid - i, 0), kBytes)));
    }
  } else {
    uint32_t words[kChunkBytes / 4];
#pragma unroll
    for (int i = 0; i < kChunkBytes / 4; ++i) {
      const auto* const elements = reinterpret_cast<const uint16_t*>(from + i * 4);
      const uint32_t low = i * 4 < valid ? elements[0] : 0u;
      const uint32_t high = i * 4 + 2 < valid ? elements[1] : 0u;
      words[i] = low | high << 16;
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

// One thread's part of copying an operand's k-blocks, made for a tile. copy(): that from k on to shared memory at `to`.
//
// Operands whose k is next to next: a thread has a chunk of the same rows in every k-block.
template <class Element, int kSides>
class CopyByK {
  using Place = SharedTile<Major::k, sizeof(Element), kSides>;
  using Plan = CopyPlan<Place>;

 public:
  // slots: of the tile's rows, in shared memory; -1: none.
  __device__ CopyByK(const RowFactor& from, const Tile& tile, const int32_t* slots) : rows_(from.rows) {
    begin(tile, [&](int row) {
      const int32_t slot = slots[row];
      if (slot < 0) return -1;
      return from.gathered ? from.map.source_of(slot) : tile.row + row;
    });
  }
  __device__ CopyByK(const WeightFactor<Major::k>& from, const Tile& tile, const int32_t*) : rows_(from.rows) {
    begin(tile, [&](int n) {
      const auto place = from.place(tile, n);
      return place.left > 0 ? place.column : -1;
    });
  }

  __device__ __forceinline__ void copy(uint32_t to, int32_t k) {
    const int32_t column = k + Plan::chunk(thread()) * kChunk<Element>;
    const int left = min(max(end_k_ - column, 0), kChunk<Element>) * static_cast<int>(sizeof(Element));
    const char* const from = data_ + static_cast<int64_t>(column) * static_cast<int64_t>(sizeof(Element));
    with_bytes<Element>(rows_.copy_bytes, [&]<int kBytes>() {
#pragma unroll
      for (int pass = 0; pass < Plan::kPasses; ++pass) {
        const int32_t row = source_[pass];
        copy_chunk<kBytes>(to + Place::chunk(Plan::row(thread(), pass), Plan::chunk(thread())),
                           from + row * rows_.row_bytes, row < 0 ? 0 : left);
      }
    });
  }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }

  template <class SourceOf>
  __device__ __forceinline__ void begin(const Tile& tile, const SourceOf& source_of) {
    data_ = rows_.data + max(tile.expert, 0) * rows_.matrix_bytes;
    end_k_ = tile.end_k;
#pragma unroll
    for (int pass = 0; pass < Plan::kPasses; ++pass) source_[pass] = source_of(Plan::row(thread(), pass));
  }

  const MatrixRows& rows_;
  const char* data_;
  int32_t end_k_;
  int32_t source_[Plan::kPasses];  // rows in memory; -1: none
};

// Operands whose sides are next to next: a thread has the same columns of other rows in every k-block.
template <class Element, int kSides>
class CopyByMn {
  using Place = SharedTile<Major::mn, sizeof(Element), kSides>;
  using Plan = CopyPlan<Place>;

 public:
  __device__ CopyByMn(const WeightFactor<Major::mn>& from, const Tile& tile, const int32_t*)
      : rows_(from.rows), map_(nullptr) {
    const auto place = from.place(tile, Plan::chunk(thread()) * kChunk<Element>);
    begin(tile, place.column, place.left);
  }
  template <Side kSide>
  __device__ CopyByMn(const SumFactor<kSide>& from, const Tile& tile, const int32_t*)
      : rows_(from.rows), map_(from.gathered ? &from.map : nullptr) {
    const int32_t column = first_of<kSide>(tile) + Plan::chunk(thread()) * kChunk<Element>;
    begin(tile, column, from.columns - column);
    find(tile.k);
  }

  // k-blocks in order.
  __device__ __forceinline__ void copy(uint32_t to, int32_t k) {
    int32_t source[Plan::kPasses];
#pragma unroll
    for (int pass = 0; pass < Plan::kPasses; ++pass) source[pass] = source_of(k, pass);
    if (map_ != nullptr) find(k + kDepth<Element>);  // slots have arrived when the next k-block begins
    with_bytes<Element>(rows_.copy_bytes, [&]<int kBytes>() {
#pragma unroll
      for (int pass = 0; pass < Plan::kPasses; ++pass) {
        copy_chunk<kBytes>(to + Place::chunk(Plan::row(thread(), pass), Plan::chunk(thread())),
                           data_ + source[pass] * rows_.row_bytes, source[pass] < 0 ? 0 : valid_);
      }
    });
  }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }

  __device__ __forceinline__ void begin(const Tile& tile, int32_t column, int32_t left) {
    data_ = rows_.data + max(tile.expert, 0) * rows_.matrix_bytes + column * static_cast<int64_t>(sizeof(Element));
    valid_ = min(max(left, 0), kChunk<Element>) * static_cast<int>(sizeof(Element));
    end_k_ = tile.end_k;
  }

  // Reads the slots of the k-block from k on.
  __device__ __forceinline__ void find(int32_t k) {
    if (map_ == nullptr) return;
#pragma unroll
    for (int pass = 0; pass < Plan::kPasses; ++pass) {
      const int32_t row = k + Plan::row(thread(), pass);
      slot_[pass] = row < end_k_ ? map_->slot_of(row) : -1;
    }
  }
  __device__ __forceinline__ int32_t source_of(int32_t k, int pass) const {
    if (map_ != nullptr) return slot_[pass] < 0 ? -1 : map_->source_of(slot_[pass]);
    const int32_t row = k + Plan::row(thread(), pass);
    return row < end_k_ ? row : -1;
  }

  const MatrixRows& rows_;
  const RowMap* map_;  // of rows that are gathered
  const char* data_;
  int32_t valid_;  // bytes of the thread's columns
  int32_t end_k_;
  int32_t slot_[Plan::kPasses];
};

template <class Factor, class Element, int kSides>
struct CopyOf {
  using type = CopyByMn<Element, kSides>;
};
template <class Factor, class Element, int kSides>
  requires(Factor::kMajor == Major::k)
struct CopyOf<Factor, Element, kSides> {
  using type = CopyByK<Element, kSides>;
};
template <class Factor, class Element, int kSides>
using Copy = typename CopyOf<Factor, Element, kSides>::type;

}  // namespace anabranch::cuda::portable
