// Epilogue that rounds and stores the accumulators.
#pragma once

#include "experts/hopper/late_subtiles.cuh"

namespace anabranch::cuda::hopper {

// Writes the result [R, N] of a GEMM over rows.
template <class Out_>
struct RowsEpilogue : NoPrefetch {
  using Out = Out_;
  static constexpr bool kDefersStores = true;
  static constexpr bool kWritesFromOneBuffer = true;
  template <class Shape>
  static constexpr bool kNeedsRegisters = Shape::kTilesInFlight == 1;

  CUtensorMap map;  // row window, boxes of a subtile
  StoredRows stored;
  int32_t columns;

  __device__ void prefetch_maps() const { prefetch_map(map); }

  template <class Shape>
  __device__ void write(SubtileWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        EmptyPrefetch) const {
    writer.write<Shape::kColumns>(*this, tile, row, acc);
  }
  template <class Shape>
  __device__ void write_zeros(SubtileWriter& writer, const Tile& tile, int row) const {
    writer.write_zeros<Shape::kColumns>(*this, tile, row);
  }

  template <class Late>
  __device__ __forceinline__ void defer(Late& late, const Tile&, int, const float* acc) const {
#pragma unroll
    for (int subtile = 0; subtile < Late::kCount; ++subtile) {
      pack_subtile<Out>(acc + subtile * kSubtileColumns<Out> / 2, late.words(subtile));
    }
  }
  __device__ __forceinline__ void write_deferred(SubtileWriter& writer, const Tile& tile, int row, int column,
                                                 const SubtileWords& words) const {
    if (tile.column + column < columns) writer.write_packed_subtile(*this, tile, row, column, words);
  }

  __device__ void send(uint32_t subtile, const Tile& tile, int row, int column) const {
    store_box(map, subtile, WindowCoordinates{tile.column + column, tile.row + row, tile.end_row});
  }
};

}  // namespace anabranch::cuda::hopper
