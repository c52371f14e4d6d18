// Epilogue of weight gradients: stores or accumulates results, or stores partial sums of segments.
#pragma once

#include <type_traits>

#include "experts/hopper/subtile_writer.cuh"

namespace anabranch::cuda::hopper {

// One matrix of an array of result matrices.
template <class Out_>
struct MatrixDestination {
  using Out = Out_;
  const CUtensorMap& map;  // matrices, boxes of a subtile
  int32_t columns;
  int32_t matrix;
  bool accumulates;  // add to the stored values; float only

  __device__ void send(uint32_t subtile, const Tile& tile, int row, int column) const {
    const MatrixCoordinates at{tile.column + column, tile.row + row, matrix};
    if (std::is_same_v<Out, float> && accumulates) {
      add_box(map, subtile, at);
    } else {
      store_box(map, subtile, at);
    }
  }
};

// Writes the weight gradient [E, D, N] and partial sums of segments.
template <class Element>
struct WeightGradientEpilogue : NoPrefetch {
  CUtensorMap map;       // matrices of Element or float
  CUtensorMap partials;  // matrices of float
  int32_t columns;
  bool d_w_is_float;  // `map` describes float32 matrices
  bool accumulates;   // add to d_w, which must be float

  __device__ void prefetch_maps() const {
    prefetch_map(map);
    prefetch_map(partials);
  }

  template <class Shape>
  __device__ void write(SubtileWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        EmptyPrefetch) const {
    constexpr int kColumns = Shape::kColumns;
    const bool whole = tile.partial == kWhole;
    if (whole && !d_w_is_float) {
      writer.write<kColumns>(MatrixDestination<Element>{map, columns, tile.expert, false}, tile, row, acc);
    } else {
      writer.write<kColumns>(MatrixDestination<float>{whole ? map : partials, columns,
                                                      whole ? tile.expert : tile.partial, whole && accumulates},
                             tile, row, acc);
    }
  }
  template <class Shape>
  __device__ void write_zeros(SubtileWriter& writer, const Tile& tile, int row) const {
    constexpr int kColumns = Shape::kColumns;
    if (!d_w_is_float) {
      writer.write_zeros<kColumns>(MatrixDestination<Element>{map, columns, tile.expert, false}, tile, row);
    } else if (!accumulates) {
      writer.write_zeros<kColumns>(MatrixDestination<float>{map, columns, tile.expert, false}, tile, row);
    }
  }
};

}  // namespace anabranch::cuda::hopper
