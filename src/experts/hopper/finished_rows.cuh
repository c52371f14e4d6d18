// The epilogue of products over rows of slots: y = scale acc + bias_scale bias, rounded once; zero in padding.
#pragma once

#include "experts/hopper/hidden_out.cuh"

namespace anabranch::cuda {

template <class Out>
struct FinishedRowsOut : WritesOnly {
  RowsOut<Out> y;
  const Out* bias;  // [E, bias_columns], from the first column of y on; or nullptr
  int64_t bias_columns;
  RowWeights weights;
  bool scales_products;  // weights multiply the sums too, not the bias alone

  __device__ void prefetch() const { y.prefetch(); }

  template <class Shape>
  __device__ void write(StripWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        NothingAhead) const {
    if (tile.row + row >= tile.end_row) return;
    const RowPair rows(weights, tile, row);
    const bool all_real = rows.all_real();
#pragma unroll
    for (int column = 0; column < Shape::kColumns; column += kStripColumns<Out>) {
      const int32_t left = y.columns - tile.column - column;
      if (left <= 0) return;
      StripValues<Out> values(acc + column / 2);
      if (scales_products) values.scale(rows);
      const int64_t end = tile.expert * bias_columns + y.columns;
      if (bias != nullptr) values.add_bias(bias + (end - left), left, &rows);
      if (!all_real) values.clear_padding(rows);
      writer.write_strip(y, tile, row, column, values.values);
    }
  }

  template <class Shape>
  __device__ void write_zeros(StripWriter& writer, const Tile& tile, int row) const {
    y.template write_zeros<Shape>(writer, tile, row);
  }
};

}  // namespace anabranch::cuda
