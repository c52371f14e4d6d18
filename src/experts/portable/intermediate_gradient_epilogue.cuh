// Epilogue of da' = d_y W_out^T. Reads h and writes, for a row of weight w,
//
//     a = phi(h_gate, h_up), or act(h) for ungated experts;   w a;   dh = phi'(h) w da';   partial sums of <da', a>
//
// All outputs are zero in padding rows. Each lane reads the elements of h before it writes the same elements of dh, so
// dh may alias h.
#pragma once

#include "core/cuda/warp.cuh"
#include "experts/activation.h"
#include "experts/portable/intermediate_rows.cuh"

namespace anabranch::cuda::portable {

template <class Element>
struct IntermediateGradientEpilogue {
  const Element* h;     // intermediate rows
  Element* dh;          // intermediate rows, or nullptr
  Element* weighted_a;  // [R, F], or nullptr
  float* dots;          // [column tiles, R]: partial sum of <da', a> per tile; or nullptr
  Activation activation;
  IntermediateRowLayout layout;
  int32_t R;
  bool aligned;  // all tensors allow 16-byte accesses

  template <class Staging>
  __device__ __forceinline__ void operator()(const StagedTile<Staging>& staged) const {
    constexpr int kEach = kChunk<Element>;
    constexpr int kLanes = kTileColumns / kEach;  // per row
    static_assert(kLanes == 16 || kLanes == 32, "the lanes of a row are adjacent");
    const Tile& tile = staged.tile;
    staged.template for_each<kEach, 1>(kTileColumns, [&](int row, int column, uint32_t place) {
      const bool is_row = tile.row + row < tile.end_row;
      float dot = 0.0f;
      if (is_row && tile.column + column < layout.F) dot = write<kEach>(staged, row, column, place);
      if (dots == nullptr) return;
      dot = sum_lanes<kLanes>(dot);
      if (is_row && column == 0) dots[int64_t{tile.column / kTileColumns} * R + tile.row + row] = dot;
    });
  }

 private:
  // Writes kEach columns of a row. Returns their partial sum of <da', a>.
  template <int kEach, class Staging>
  __device__ __forceinline__ float write(const StagedTile<Staging>& staged, int row, int column, uint32_t place) const {
    const int32_t first = staged.tile.column + column;
    const int64_t at = staged.tile.row + row;
    const int64_t h_row = at * layout.parts * layout.F;
    const int32_t slot = staged.slots[row];
    float runs[2][kEach] = {};  // h, then dh
    float values[kEach] = {};   // da', then w a
    float dot = 0.0f;
    if (slot >= 0) {
      const float weight = staged.weight(row);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i >= layout.parts) continue;
        load_row(h + h_row + layout.begin_of_run(first, i, kEach), layout.count_of_run(first, i, kEach), aligned,
                 runs[i]);
      }
      load_staged(place, column, values);
      separate(layout.interleaved, runs[0], runs[1]);
      with_formula(activation, [&]<Formula kFormula>() {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const float up = layout.parts == 2 ? runs[1][i] : 1.0f;
          const ActivationAt a = activate_with_slopes<kFormula>(activation, runs[0][i], up);
          const float weighted = weight * values[i];
          if (first + i < layout.F) dot = fmaf(values[i], a.value, dot);
          runs[0][i] = weighted * a.by_gate;
          runs[1][i] = weighted * a.by_up;
          values[i] = weight * a.value;
        }
      });
      alternate(layout.interleaved, runs[0], runs[1]);
    }
    if (dh != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i >= layout.parts) continue;
        store_row(runs[i], dh + h_row + layout.begin_of_run(first, i, kEach), layout.count_of_run(first, i, kEach),
                  aligned);
      }
    }
    if (weighted_a != nullptr) store_row(values, weighted_a + at * layout.F + first, layout.F - first, aligned);
    return dot;
  }
};

}  // namespace anabranch::cuda::portable
