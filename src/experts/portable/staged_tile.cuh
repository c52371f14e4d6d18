// Input of an epilogue: some rows of a tile's accumulators in shared memory, and the loop over them.
#pragma once

#include <bit>

#include "core/cuda/shared.cuh"
#include "core/cuda/vector.cuh"
#include "experts/cuda/ops/tiles/tile.cuh"
#include "experts/portable/shared_tile.h"

namespace anabranch::cuda::portable {

template <class Staging>
struct StagedTile {
  using Shape = typename Staging::Shape;
  const Tile& tile;
  uint32_t values;  // shared-memory address
  int part;         // index of the staged fragment row of each warp
  const int32_t* slots;
  uint32_t weights;  // shared-memory address of the row weights; 0 for rows without an assignment

  __device__ uint32_t weight_place(int row) const { return weights + static_cast<uint32_t>(row) * 4; }
  __device__ float weight(int row) const { return load_shared<float>(weight_place(row)); }

  // Calls visit(row, column, place) for kEach adjacent columns at a time. columns: kTileColumns or half of them. row
  // and column are relative to the tile, place is the address of the row's column 0. Adjacent lanes get adjacent
  // columns, and all threads of the CTA make the same number of visits, so visits may use warp shuffles. kAtATime:
  // unroll factor, so that instructions of several visits interleave.
  template <int kEach, int kAtATime, class Visit>
  __device__ __forceinline__ void for_each(int columns, const Visit& visit) const {
    const Visits<kEach> visits(columns);
#pragma unroll kAtATime
    for (int i = static_cast<int>(threadIdx.x); i < visits.count(); i += Shape::kThreads) {
      visit(Staging::row_of_tile(visits.row(i), part), visits.column(i), values + Staging::place(visits.row(i), 0));
    }
  }

 private:
  template <int kEach>
  class Visits {
   public:
    __device__ explicit Visits(int columns) : shift_(columns == kTileColumns ? kWhole : kWhole - 1) {}
    __device__ int count() const { return kStagedRows<Shape> << shift_; }
    __device__ int row(int i) const { return i >> shift_; }
    __device__ int column(int i) const { return (i & ((1 << shift_) - 1)) * kEach; }

   private:
    static constexpr int kWhole = std::countr_zero(static_cast<unsigned>(kTileColumns / kEach));
    int shift_;  // log2 of the visits per row
  };
};

// Adjacent elements of a row.
template <int kEach>
using Neighbours = float[kEach];

template <int kEach>
__device__ __forceinline__ void load_staged(uint32_t place, int column, Neighbours<kEach>& values) {
#pragma unroll
  for (int i = 0; i < kEach; i += 4) {
    const auto four = load_shared<uint4>(place + static_cast<uint32_t>(column + i) * 4);
    values[i] = float_from_bits(four.x);
    values[i + 1] = float_from_bits(four.y);
    values[i + 2] = float_from_bits(four.z);
    values[i + 3] = float_from_bits(four.w);
  }
}

// Loads the first `count` elements and fills up with zeros. aligned: use 16-byte loads if all elements are in bounds.
template <class T, int kEach>
__device__ __forceinline__ void load_row(const T* from, int count, bool aligned, Neighbours<kEach>& values) {
  constexpr int kVectorElements = kAccessBytes / static_cast<int>(sizeof(T));
  static_assert(kEach % kVectorElements == 0, "a thread stores whole vectors");
  if (aligned && count >= kEach) {
#pragma unroll
    for (int i = 0; i < kEach; i += kVectorElements) {
      Vector<T, kVectorElements> vector;
      vector.load(from + i);
#pragma unroll
      for (int j = 0; j < kVectorElements; ++j) values[i + j] = vector[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) values[i] = i < count ? to_float(from[i]) : 0.0f;
  }
}
template <class T, int kEach>
__device__ __forceinline__ void store_row(const Neighbours<kEach>& values, T* to, int count, bool aligned) {
  constexpr int kVectorElements = kAccessBytes / static_cast<int>(sizeof(T));
  static_assert(kEach % kVectorElements == 0, "a thread stores whole vectors");
  if (aligned && count >= kEach) {
#pragma unroll
    for (int i = 0; i < kEach; i += kVectorElements) {
      float some[kVectorElements];
#pragma unroll
      for (int j = 0; j < kVectorElements; ++j) some[j] = values[i + j];
      *reinterpret_cast<typename Vector<T, kVectorElements>::Bytes*>(to + i) =
          Vector<T, kVectorElements>::from(some).bytes;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i < count) to[i] = from_float<T>(values[i]);
    }
  }
}

// Whether all rows allow 16-byte accesses. True for nullptr.
template <class T>
bool are_aligned(const T* data, int64_t columns) {
  return data == nullptr ||
         common_alignment({address(data), static_cast<uintptr_t>(columns) * sizeof(T)}) == kAccessBytes;
}

}  // namespace anabranch::cuda::portable
