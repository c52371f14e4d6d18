// The plain epilogue: accumulators are rounded and stored.
#pragma once

#include "experts/hopper/subtile_writer.cuh"

namespace anabranch::cuda::hopper {

// The result [R, N] of a product over rows.
template <class Out_>
struct RowsEpilogue : PrefetchesNothing {
  using Out = Out_;
  CUtensorMap map;  // row window, boxes of a subtile
  int32_t columns;

  __device__ void prefetch_maps() const { prefetch_map(map); }

  template <class Shape>
  __device__ void write(SubtileWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        NothingPrefetched) const {
    writer.write<Shape::kColumns>(*this, tile, row, acc);
  }
  template <class Shape>
  __device__ void write_zeros(SubtileWriter& writer, const Tile& tile, int row) const {
    writer.write_zeros<Shape::kColumns>(*this, tile, row);
  }

  __device__ void send(uint32_t subtile, const Tile& tile, int row, int column) const {
    store_box(map, subtile, WindowCoordinates{tile.column + column, tile.row + row, tile.end_row});
  }
};

}  // namespace anabranch::cuda::hopper
