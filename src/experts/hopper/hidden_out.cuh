// The epilogue of the up product: h = acc + b_in,  a = act(h_gate) h_up, or act(h) of ungated experts, times the row's
// weight where it comes early.
#pragma once

#include "experts/activation.h"
#include "experts/hopper/row_weights.cuh"
#include "experts/hopper/store.cuh"

namespace anabranch::cuda {

// A strip of accumulators as values that may change.
template <class Out>
struct StripValues {
  static constexpr int kCount = kStripColumns<Out> / 2;
  float values[kCount];

  __device__ __forceinline__ explicit StripValues(const float* acc) { copy_accumulators(values, acc); }

  // Times the rows' weights.
  __device__ __forceinline__ void scale(const RowPair& rows) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] *= rows.weight[i / 2 % 2];
  }

  // Plus a bias from `bias` on, 4-byte aligned, `left` elements of it, times the rows' weights if they are given.
  __device__ __forceinline__ void add_bias(const Out* bias, int left, const RowPair* weights = nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int column = i * 2 + lane_index() % 4 * 2;
      if (column >= left) return;
      const auto pair = *reinterpret_cast<const uint32_t*>(bias + column);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float value = j % 2 == 0 ? low_half<Out>(pair) : high_half<Out>(pair);
        values[i + j] = weights == nullptr ? values[i + j] + value : fmaf(weights->weight[j / 2], value, values[i + j]);
      }
    }
  }

  // Becomes 0 in rows that are padding.
  __device__ __forceinline__ void clear_padding(const RowPair& rows) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!rows.real[i / 2 % 2]) values[i] = 0.0f;
    }
  }
};

// kParts 2: the first half of a tile's columns are the gate's (GatedWeights). Columns count those of `a`.
template <class Element, int kParts>
struct HiddenOut : WritesOnly {
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
  static constexpr bool kTakesRegisters = true;

  template <class Shape>
  __device__ void write(StripWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        NothingAhead) const {
    if (tile.row + row >= tile.end_row) return;
    constexpr int kWidth = Shape::kColumns / kParts;
    const RowPair rows(weights, tile, row);
    const bool all_real = rows.all_real();
#pragma unroll
    for (int column = 0; column < kWidth; column += kStripColumns<Element>) {
      const int32_t left = columns - tile.column - column;
      if (left <= 0) return;
      const float* parts[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) parts[part] = acc + (part * kWidth + column) / 2;
      float a_strip[Values::kCount];
      if (b_in == nullptr && all_real) {
        write_hidden(writer, tile, row, column, parts, a_strip);
      } else {
        write_finished(writer, tile, row, column, left, parts, rows, all_real, a_strip);
      }
      if (weights.weights != nullptr) {
#pragma unroll
        for (int i = 0; i < Values::kCount; ++i) a_strip[i] *= rows.weight[i / 2 % 2];
      }
      writer.write_strip(To{a, columns}, tile, row, column, a_strip);
    }
  }

  template <class Shape>
  __device__ void write_zeros(StripWriter& writer, const Tile& tile, int row) const {
    writer.write_zeros<Shape::kColumns / kParts>(To{a, columns}, tile, row);
    if (!keeps_h) return;
#pragma unroll
    for (const CUtensorMap& map : h) writer.write_zeros<Shape::kColumns / kParts>(To{map, columns}, tile, row);
  }

 private:
  using Values = StripValues<Element>;

  struct To {
    using Out = Element;
    const CUtensorMap& map;
    int32_t columns;
    __device__ void send(uint32_t strip, const Tile& tile, int row, int column) const {
      store_box(map, strip, WindowCoordinates{tile.column + column, tile.row + row, tile.end_row});
    }
  };

  // Writes a strip of h, if it is kept, and finds a; h: of gate and up.
  __device__ __forceinline__ void write_hidden(StripWriter& writer, const Tile& tile, int row, int column,
                                               const float* const (&hidden)[kParts],
                                               float (&result)[Values::kCount]) const {
    if (keeps_h) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        writer.write_strip(To{h[part], columns}, tile, row, column, hidden[part]);
      }
    }
    with_activation(activation, [&]<int32_t kActivation>() {
#pragma unroll
      for (int i = 0; i < Values::kCount; ++i) {
        result[i] = activate<kActivation>(hidden[0][i]);
        if constexpr (kParts == 2) result[i] *= hidden[1][i];
      }
    });
  }

  // The same of accumulators that lack the bias, or have padding among their rows.
  __device__ __forceinline__ void write_finished(StripWriter& writer, const Tile& tile, int row, int column,
                                                 int32_t left, const float* const (&acc)[kParts], const RowPair& rows,
                                                 bool all_real, float (&result)[Values::kCount]) const {
    Values gate(acc[0]);
    finish(gate, 0, tile, left, rows, all_real);
    if constexpr (kParts == 2) {
      Values up(acc[1]);
      finish(up, 1, tile, left, rows, all_real);
      write_hidden(writer, tile, row, column, {gate.values, up.values}, result);
    } else {
      write_hidden(writer, tile, row, column, {gate.values}, result);
    }
  }

  __device__ __forceinline__ void finish(Values& values, int part, const Tile& tile, int32_t left, const RowPair& rows,
                                         bool all_real) const {
    const int64_t end = (static_cast<int64_t>(tile.expert) * kParts + part + 1) * columns;
    if (b_in != nullptr) values.add_bias(b_in + (end - left), left);
    if (!all_real) values.clear_padding(rows);
  }
};

}  // namespace anabranch::cuda
