// The epilogue of the up product: h = acc + b_in,  a = phi(h_gate, h_up), or act(h) of ungated experts, times the row's
// weight where it comes early.
#pragma once

#include "experts/activation.h"
#include "experts/hopper/column_pairs.cuh"
#include "experts/hopper/row_weights.cuh"
#include "experts/hopper/subtile_values.cuh"

namespace anabranch::cuda::hopper {

// kParts 2: the first half of a tile's columns are the gate's (GatedWeightOperand). Columns count those of `a`.
template <class Element, int kParts>
struct UpEpilogue : PrefetchesNothing {
  CUtensorMap h[kParts];  // row windows of [R, F] each, boxes of a subtile
  CUtensorMap a;
  const Element* b_in;  // [E, kParts, F], or nullptr
  RowWeights weights;   // early ones
  int32_t columns;      // F
  Activation activation;
  bool keeps_h;

  __device__ void prefetch_maps() const {
#pragma unroll
    for (const CUtensorMap& map : h) prefetch_map(map);
    prefetch_map(a);
  }

  template <class Shape>
  static constexpr bool kTakesRegisters = true;

  template <class Shape>
  __device__ void write(SubtileWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        NothingPrefetched) const {
    if (tile.row + row >= tile.end_row) return;
    constexpr int kWidth = Shape::kColumns / kParts;
    const RowPair rows(weights, tile, row);
    const bool all_real = rows.all_real();
#pragma unroll
    for (int column = 0; column < kWidth; column += kSubtileColumns<Element>) {
      const int32_t left = columns - tile.column - column;
      if (left <= 0) return;
      const float* parts[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) parts[part] = acc + (part * kWidth + column) / 2;
      float a_subtile[Values::kCount];
      if (b_in == nullptr && all_real) {
        write_hidden(writer, tile, row, column, parts, a_subtile);
      } else {
        write_finished(writer, tile, row, column, left, parts, rows, all_real, a_subtile);
      }
      if (weights.weights != nullptr) {
#pragma unroll
        for (int i = 0; i < Values::kCount; ++i) a_subtile[i] *= rows.weight[i / 2 % 2];
      }
      writer.write_subtile(Destination{a, columns}, tile, row, column, a_subtile);
    }
  }

  template <class Shape>
  __device__ void write_zeros(SubtileWriter& writer, const Tile& tile, int row) const {
    writer.write_zeros<Shape::kColumns / kParts>(Destination{a, columns}, tile, row);
    if (!keeps_h) return;
#pragma unroll
    for (const CUtensorMap& map : h) writer.write_zeros<Shape::kColumns / kParts>(Destination{map, columns}, tile, row);
  }

 private:
  using Values = SubtileValues<Element>;

  struct Destination {
    using Out = Element;
    const CUtensorMap& map;
    int32_t columns;
    __device__ void send(uint32_t subtile, const Tile& tile, int row, int column) const {
      store_box(map, subtile, WindowCoordinates{tile.column + column, tile.row + row, tile.end_row});
    }
  };

  // Writes a subtile of h, if it is kept, and finds a; h: of gate and up.
  __device__ __forceinline__ void write_hidden(SubtileWriter& writer, const Tile& tile, int row, int column,
                                               const float* const (&hidden)[kParts],
                                               float (&result)[Values::kCount]) const {
    if (keeps_h) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        writer.write_subtile(Destination{h[part], columns}, tile, row, column, hidden[part]);
      }
    }
    with_common_formula(activation, [&]<Formula kFormula>() {
      if constexpr (kFormula == Formula::any) {
#pragma unroll
        for (int i = 0; i < Values::kCount; i += 2 * kPairs) activate_eight(hidden, i, result);
      } else {
#pragma unroll
        for (int i = 0; i < Values::kCount; ++i) {
          result[i] = activate<kFormula>(activation, hidden[0][i], kParts == 2 ? hidden[kParts - 1][i] : 1.0f);
        }
      }
    });
  }

  // From column `begin` of the subtile on.
  __device__ __forceinline__ void activate_eight(const float* const (&hidden)[kParts], int begin,
                                                 float (&result)[Values::kCount]) const {
    uint32_t in[2 * kParts][kPairs];
    uint32_t out[2][kPairs];
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) in[2 * part + i % 2][i / 2] = bits_of(hidden[part][begin + i]);
    }
    for_column_pairs(in, out, [&](const uint32_t (&of)[2 * kParts], uint32_t (&a)[2]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float up = kParts == 2 ? float_from_bits(of[2 * kParts - 2 + i]) : 1.0f;
        a[i] = bits_of(activate<Formula::any>(activation, float_from_bits(of[i]), up));
      }
    });
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) result[begin + i] = float_from_bits(out[i % 2][i / 2]);
  }

  // The same of accumulators that lack the bias, or have padding among their rows.
  __device__ __forceinline__ void write_finished(SubtileWriter& writer, const Tile& tile, int row, int column,
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

}  // namespace anabranch::cuda::hopper
