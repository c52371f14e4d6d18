// The epilogue of products over rows of slots that have weights: y = weight acc, where the accumulators have the bias,
// or y = acc + weight bias, where x has the weights already. Rounded once; zero in padding.
#pragma once

#include "experts/hopper/rows_epilogue.cuh"
#include "experts/hopper/subtile_values.cuh"

namespace anabranch::cuda::hopper {

template <class Out>
struct ScaleBiasEpilogue : PrefetchesNothing {
  RowsEpilogue<Out> y;
  const Out* bias;  // [E, bias_columns], from the first column of y on, where weights multiply it alone; or nullptr
  int64_t bias_columns;
  RowWeights weights;
  bool scales_products;  // weights multiply the accumulators

  __device__ void prefetch_maps() const { y.prefetch_maps(); }

  template <class Shape>
  __device__ void write(SubtileWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        NothingPrefetched) const {
    if (tile.row + row >= tile.end_row) return;
    const RowPair rows(weights, tile, row);
    const bool all_real = rows.all_real();
#pragma unroll
    for (int column = 0; column < Shape::kColumns; column += kSubtileColumns<Out>) {
      const int32_t left = y.columns - tile.column - column;
      if (left <= 0) return;
      SubtileValues<Out> values(acc + column / 2);
      if (scales_products) values.scale(rows);
      const int64_t end = tile.expert * bias_columns + y.columns;
      if (bias != nullptr) values.add_weighted(bias + (end - left), left, rows);
      if (!all_real) values.clear_padding(rows);
      writer.write_subtile(y, tile, row, column, values.values);
    }
  }

  template <class Shape>
  __device__ void write_zeros(SubtileWriter& writer, const Tile& tile, int row) const {
    y.template write_zeros<Shape>(writer, tile, row);
  }
};

}  // namespace anabranch::cuda::hopper
