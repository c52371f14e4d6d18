// The epilogue of the down product: y = scale acc + bias_scale b_out, rounded once; zero in padding.
#pragma once

#include "experts/hopper/hidden_out.cuh"

namespace anabranch::cuda {

template <class Out>
struct FinishedRowsOut {
  RowsOut<Out> y;
  const Out* bias;  // [E, columns], or nullptr
  RowWeights weights;
  bool scales_products;  // weights multiply the sums too, not the bias alone

  __device__ void prefetch() const { y.prefetch(); }

  template <class Shape>
  __device__ NothingAhead begin(const Tile&, int) const {
    return {};
  }

  template <class Shape>
  __device__ void write(StripWriter& writer, const Tile& tile, int row, float (&acc)[Shape::kColumns / 2],
                        NothingAhead ahead) const {
    if (tile.row + row >= tile.end_row) return;
    const RowPair rows(weights, tile, row);
    if (scales_products) scale<Shape::kColumns>(acc, rows);
    if (bias != nullptr) add_scaled_bias<Shape::kColumns>(acc, tile, rows);
    if (!rows.all_real()) clear_padding<Shape::kColumns>(acc, rows);
    y.template write<Shape>(writer, tile, row, acc, ahead);
  }

  template <class Shape>
  __device__ void write_zeros(StripWriter& writer, const Tile& tile, int row) const {
    y.template write_zeros<Shape>(writer, tile, row);
  }

 private:
  template <int kColumns>
  static __device__ __forceinline__ void scale(float (&acc)[kColumns / 2], const RowPair& rows) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[i] *= rows.weight[i / 2 % 2];
  }

  template <int kColumns>
  __device__ __forceinline__ void add_scaled_bias(float (&acc)[kColumns / 2], const Tile& tile,
                                                  const RowPair& rows) const {
    const Out* from = bias + static_cast<int64_t>(tile.expert) * y.columns;
#pragma unroll
    for (int eight = 0; eight < kColumns / 8; ++eight) {
      const int column = tile.column + eight * 8 + lane_index() % 4 * 2;
      if (column >= y.columns) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[eight * 4 + i] = fmaf(rows.weight[i / 2], to_float(from[column + i % 2]), acc[eight * 4 + i]);
      }
    }
  }
};

}  // namespace anabranch::cuda
