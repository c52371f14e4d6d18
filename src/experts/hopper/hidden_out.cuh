// The epilogue of the up product: h = acc + b_in,  a = act(h_gate) h_up, or act(h) of ungated experts, times the row's
// weight where it comes early.
#pragma once

#include "experts/activation.h"
#include "experts/hopper/row_weights.cuh"
#include "experts/hopper/store.cuh"

namespace anabranch::cuda {

// acc, two neighbouring columns of each eight a lane, plus the bias of the columns from `bias` on, of which there are
// so many.
template <int kCount, class Element>
__device__ __forceinline__ void add_bias(float* acc, const Element* bias, int columns) {
#pragma unroll
  for (int eight = 0; eight < kCount / 8; ++eight) {
    const int column = eight * 8 + lane_index() % 4 * 2;
    if (column >= columns) return;
    float* values = acc + eight * 4;
    const float low = to_float(bias[column]);
    const float high = to_float(bias[column + 1]);
    values[0] += low;
    values[1] += high;
    values[2] += low;
    values[3] += high;
  }
}

// acc, becomes 0 in rows that are padding.
template <int kCount>
__device__ __forceinline__ void clear_padding(float* acc, const RowPair& rows) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    if (!rows.real[i / 2 % 2]) acc[i] = 0.0f;
  }
}

// kParts 2: the first half of a tile's columns are the gate's (GatedWeights). Columns count those of `a`.
template <class Element, int kParts>
struct HiddenOut {
  CUtensorMap h[kParts];  // row windows of [R, F] each, boxes of a strip
  CUtensorMap a;
  const Element* b_in;  // [E, kParts, F], or nullptr
  RowWeights weights;   // early ones
  int32_t columns;      // F
  int32_t activation;
  bool keeps_h;

  __device__ void prefetch() const {
#pragma unroll
    for (const CUtensorMap& map : h) prefetch_map(map);
    prefetch_map(a);
  }

  template <class Shape>
  __device__ NothingAhead begin(const Tile&, int) const {
    return {};
  }

  template <class Shape>
  __device__ void write(StripWriter& writer, const Tile& tile, int row, float (&acc)[Shape::kColumns / 2],
                        NothingAhead) const {
    if (tile.row + row >= tile.end_row) return;
    constexpr int kWidth = Shape::kColumns / kParts;
    const RowPair rows(weights, tile, row);
    const bool all_real = rows.all_real();
#pragma unroll
    for (int column = 0; column < kWidth; column += kStripWidth) {
      if (tile.column + column >= columns) return;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float* values = acc + (part * kWidth + column) / 2;
        if (b_in != nullptr) {
          const int64_t at = (static_cast<int64_t>(tile.expert) * kParts + part) * columns + tile.column + column;
          add_bias<kStripWidth>(values, b_in + at, columns - tile.column - column);
        }
        if (!all_real) clear_padding<kStripWidth>(values, rows);
        if (keeps_h) {
          writer.write_strip<Shape::kColumns>(To{h[part], columns}, tile, row, column, acc, part * kWidth + column);
        }
      }
      activate_strip<kWidth / 2>(acc + column / 2, rows);
      writer.write_strip<Shape::kColumns>(To{a, columns}, tile, row, column, acc, column);
    }
  }

  // Rows past the groups: nothing reads their `a`.
  template <class Shape>
  __device__ void write_zeros(StripWriter& writer, const Tile& tile, int row) const {
    if (!keeps_h) return;
#pragma unroll
    for (const CUtensorMap& map : h) writer.write_zeros<Shape::kColumns / kParts>(To{map, columns}, tile, row);
  }

 private:
  static constexpr int kStripWidth = kStripColumns<Element>;

  struct To {
    using Out = Element;
    const CUtensorMap& map;
    int32_t columns;
    __device__ void send(uint32_t strip, const Tile& tile, int row, int column) const {
      store_box(map, strip, WindowCoordinates{tile.column + column, tile.row + row, tile.end_row});
    }
  };

  // `up` stands kToUp accumulators behind the gate.
  template <int kToUp>
  __device__ __forceinline__ void activate_strip(float* gate, const RowPair& rows) const {
    with_activation(activation, [&]<int32_t kActivation>() {
#pragma unroll
      for (int i = 0; i < kStripWidth / 2; ++i) {
        float value = activate<kActivation>(gate[i]);
        if constexpr (kParts == 2) value *= gate[i + kToUp];
        gate[i] = value * rows.weight[i / 2 % 2];
      }
    });
  }
};

}  // namespace anabranch::cuda
