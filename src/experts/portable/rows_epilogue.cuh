// Epilogue of GEMMs over rows: y = weight (factor acc + bias), or factor acc + weight bias if x already contains the
// weights. Rounded once; padding rows are zero.
#pragma once

#include "experts/portable/staged_tile.cuh"

namespace anabranch::cuda::portable {

template <class Element>
struct RowsEpilogue {
  Element* y;           // [R, columns]
  const Element* bias;  // [E, bias_columns], starting at the first column of y; or nullptr
  int64_t bias_columns;
  float factor;
  bool weight_early;
  bool y_aligned;
  bool bias_aligned;
  int32_t columns;

  template <class Staging>
  __device__ __forceinline__ void operator()(const StagedTile<Staging>& staged) const {
    constexpr int kEach = kChunk<Element>;
    const Tile& tile = staged.tile;
    staged.template for_each<kEach, 2>(kTileColumns, [&](int row, int column, uint32_t place) {
      const int32_t left = columns - tile.column - column;
      if (tile.row + row >= tile.end_row || left <= 0) return;
      float values[kEach];
      load_staged(place, column, values);
      const int32_t slot = staged.slots[row];
      const float weight = staged.weight(row);
      const float scale = weight_early ? factor : weight * factor;
#pragma unroll
      for (float& value : values) value = slot < 0 ? 0.0f : scale * value;
      if (slot >= 0 && bias != nullptr) {
        float added[kEach];
        load_row(bias + tile.expert * bias_columns + tile.column + column, left, bias_aligned, added);
#pragma unroll
        for (int i = 0; i < kEach; ++i) values[i] = fmaf(weight, added[i], values[i]);
      }
      store_row(values, y + (tile.row + row) * int64_t{columns} + tile.column + column, left, y_aligned);
    });
  }
};

}  // namespace anabranch::cuda::portable
