// Epilogue of weight gradients: stores or accumulates results, or stores partial sums of segments.
#pragma once

#include "experts/portable/staged_tile.cuh"

namespace anabranch::cuda::portable {

template <class Element>
struct WeightGradientEpilogue {
  void* d_w;        // [E, rows, columns] of Element or float
  float* partials;  // [partials, rows, columns]
  int32_t rows;
  int32_t columns;
  bool d_w_is_float;
  bool accumulates;  // add to d_w, which must be float
  bool aligned;      // d_w allows 16-byte accesses; partials do if columns % 4 == 0

  template <class Staging>
  __device__ __forceinline__ void operator()(const StagedTile<Staging>& staged) const {
    constexpr int kEach = kChunk<Element>;
    const Tile& tile = staged.tile;
    const bool whole = tile.partial == kWhole;
    staged.template for_each<kEach, 1>(kTileColumns, [&](int row, int column, uint32_t place) {
      const int32_t left = columns - tile.column - column;
      if (tile.row + row >= tile.end_row || left <= 0) return;
      float values[kEach];
      load_staged(place, column, values);
      const int64_t matrix = whole ? tile.expert : tile.partial;
      const int64_t at = (matrix * rows + tile.row + row) * columns + tile.column + column;
      if (whole && !d_w_is_float) {
        store_row(values, static_cast<Element*>(d_w) + at, left, aligned);
        return;
      }
      float* const to = (whole ? static_cast<float*>(d_w) : partials) + at;
      const bool in_vectors = whole ? aligned : columns % 4 == 0;
      if (whole && accumulates) {
        float before[kEach];
        load_row(to, left, in_vectors, before);
#pragma unroll
        for (int i = 0; i < kEach; ++i) values[i] += before[i];
      }
      store_row(values, to, left, in_vectors);
    });
  }
};

}  // namespace anabranch::cuda::portable
