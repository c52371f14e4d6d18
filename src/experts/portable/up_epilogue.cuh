// Epilogue of the up GEMM: h = acc + bias and a = phi(h_gate, h_up), or act(h) for ungated experts, times the row's
// weight if it is applied early. The activation reads h before rounding. Padding rows of h and `a` are zero.
#pragma once

#include "experts/activation.h"
#include "experts/portable/intermediate_rows.cuh"

namespace anabranch::cuda::portable {

template <class Element>
struct UpEpilogue {
  Element* h;           // intermediate rows, or nullptr
  Element* a;           // [R, F]
  const Element* bias;  // one intermediate row per expert, or nullptr
  Activation activation;
  IntermediateRowLayout layout;
  bool aligned;  // all tensors allow 16-byte accesses

  template <class Staging>
  __device__ __forceinline__ void operator()(const StagedTile<Staging>& staged) const {
    constexpr int kEach = kChunk<Element>;
    const Tile& tile = staged.tile;
    const int width = kTileColumns / layout.parts;
    staged.template for_each<kEach, 2>(width, [&](int row, int column, uint32_t place) {
      const int32_t first = tile.column + column;
      if (tile.row + row >= tile.end_row || first >= layout.F) return;
      const int32_t slot = staged.slots[row];
      float runs[2][kEach] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i >= layout.parts) continue;
        load_staged(place, layout.interleaved ? 2 * column + i * kEach : i * width + column, runs[i]);
        if (slot < 0) {
#pragma unroll
          for (float& value : runs[i]) value = 0.0f;
        } else if (bias != nullptr) {
          float added[kEach];
          load_row(bias + tile.expert * row_columns() + layout.begin_of_run(first, i, kEach),
                   layout.count_of_run(first, i, kEach), aligned, added);
#pragma unroll
          for (int j = 0; j < kEach; ++j) runs[i][j] += added[j];
        }
        if (h != nullptr) {
          store_row(runs[i], h + (tile.row + row) * row_columns() + layout.begin_of_run(first, i, kEach),
                    layout.count_of_run(first, i, kEach), aligned);
        }
      }
      separate(layout.interleaved, runs[0], runs[1]);
      float values[kEach] = {};
      if (slot >= 0) {
        const float weight = staged.weight(row);
        with_formula(activation, [&]<Formula kFormula>() {
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            values[i] = weight * activate<kFormula>(activation, runs[0][i], layout.parts == 2 ? runs[1][i] : 1.0f);
          }
        });
      }
      store_row(values, a + (tile.row + row) * int64_t{layout.F} + first, layout.F - first, aligned);
    });
  }

 private:
  __device__ int64_t row_columns() const { return int64_t{layout.parts} * layout.F; }
};

}  // namespace anabranch::cuda::portable
