// Epilogue of GEMMs over rows with weights: y = weight acc, where acc already contains the bias, or y = acc + weight
// bias, where x already contains the weights. Rounded once; padding rows are zero.
#pragma once

#include "experts/hopper/rows_epilogue.cuh"
#include "experts/hopper/subtile_values.cuh"

namespace anabranch::cuda::hopper {

template <class Out>
struct ScaleBiasEpilogue : NoPrefetch {
  static constexpr bool kDefersStores = true;
  template <class Shape>
  static constexpr bool kNeedsRegisters = Shape::kTilesInFlight == 1;

  RowsEpilogue<Out> y;
  const Out* bias;  // [E, bias_columns], from the first column of y on; nullptr unless weights multiply only the bias
  int64_t bias_columns;
  RowWeights weights;
  bool scales_accumulators;  // the weights multiply the accumulators

  __device__ void prefetch_maps() const { y.prefetch_maps(); }

  template <class Shape>
  __device__ void write(SubtileWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        EmptyPrefetch) const {
    if (tile.row + row >= tile.end_row) return;
    const RowPair rows(weights, tile, row);
    const bool all_real = rows.all_real();
#pragma unroll
    for (int column = 0; column < Shape::kColumns; column += kSubtileColumns<Out>) {
      if (tile.column + column >= y.columns) return;
      const SubtileValues<Out> result = subtile_of(tile, column, acc, rows, all_real);
      writer.write_subtile(y, tile, row, column, result.values);
    }
  }

  template <class Late>
  __device__ __forceinline__ void defer(Late& late, const Tile& tile, int row, const float* acc) const {
    const RowPair rows(weights, tile, row);
    const bool all_real = rows.all_real();
#pragma unroll
    for (int subtile = 0; subtile < Late::kCount; ++subtile) {
      const int column = subtile * kSubtileColumns<Out>;
      pack_subtile<Out>(subtile_of(tile, column, acc, rows, all_real).values, late.words(subtile));
    }
  }
  __device__ __forceinline__ void write_deferred(SubtileWriter& writer, const Tile& tile, int row, int column,
                                                 const SubtileWords& words) const {
    y.write_deferred(writer, tile, row, column, words);
  }

  template <class Shape>
  __device__ void write_zeros(SubtileWriter& writer, const Tile& tile, int row) const {
    y.template write_zeros<Shape>(writer, tile, row);
  }

 private:
  // Returns the subtile of the tile's columns from `column` on.
  __device__ __forceinline__ SubtileValues<Out> subtile_of(const Tile& tile, int column, const float* acc,
                                                           const RowPair& rows, bool all_real) const {
    SubtileValues<Out> result(acc + column / 2);
    if (scales_accumulators) result.scale(rows);
    const int32_t left = y.columns - tile.column - column;
    const int64_t end = tile.expert * bias_columns + y.columns;
    if (bias != nullptr) result.add_weighted(bias + (end - left), left, rows);
    if (!all_real) result.clear_padding(rows);
    return result;
  }
};

}  // namespace anabranch::cuda::hopper
