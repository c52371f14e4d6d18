// Epilogue of the up GEMM: h = acc and a = phi(h_gate, h_up), or act(h) for ungated experts, times the row's weight if
// it is applied early.
#pragma once

#include "experts/activation.h"
#include "experts/hopper/column_pairs.cuh"
#include "experts/hopper/gate_up_layout.h"
#include "experts/hopper/quads.cuh"
#include "experts/hopper/row_weights.cuh"
#include "experts/hopper/subtile_values.cuh"

namespace anabranch::cuda::hopper {

// Gated layout: the first half of a tile's columns are gate columns (GatedWeightOperand). `columns` and the columns of
// a tile refer to `a`.
template <class Element, GateUpLayout kLayout>
struct UpEpilogue : NoPrefetch {
  static constexpr int kParts = parts_of(kLayout);
  static constexpr int kMapsOfH = kLayout == GateUpLayout::gated ? 2 : 1;

  CUtensorMap h[kMapsOfH];  // row windows of [R, F] each, or of [R, 2 F], boxes of a subtile
  CUtensorMap a;
  StoredRows stored_h[kMapsOfH];
  StoredRows stored_a;
  RowWeights weights;  // null unless applied early
  int32_t columns;     // F
  Activation activation;
  bool writes_h;

  __device__ void prefetch_maps() const {
#pragma unroll
    for (const CUtensorMap& map : h) prefetch_map(map);
    prefetch_map(a);
  }

  template <class Shape>
  static constexpr bool kNeedsRegisters = true;
  static constexpr bool kWritesFromOneBuffer = true;

  template <class Shape>
  __device__ void write(SubtileWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        EmptyPrefetch) const {
    if (tile.row + row >= tile.end_row) return;
    constexpr int kWidth = Shape::kColumns / kParts;
    const RowPair rows(weights, tile, row);
    const bool all_real = rows.all_real();
#pragma unroll
    for (int column = 0; column < kWidth; column += kSubtileColumns<Element>) {
      if (tile.column + column >= columns) return;
      if constexpr (kLayout == GateUpLayout::interleaved) {
        uint32_t a_words[Values::kCount / 2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          write_pairs(writer, tile, row, 2 * column + half * kSubtileColumns<Element>, acc, rows, all_real,
                      a_words + half * (Values::kCount / 4));
        }
        writer.write_packed_subtile(Destination{a, stored_a, columns}, tile, row, column, a_words);
      } else if constexpr (Shape::kPackedBytes > 0) {
        write_by_sixteens(writer, tile, row, column, acc + column / 2, acc + (kWidth * (kParts - 1) + column) / 2, rows,
                          all_real);
      } else {
        const float* parts[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) parts[part] = acc + (part * kWidth + column) / 2;
        float a_subtile[Values::kCount];
        if (all_real) {
          write_h(writer, tile, row, column, parts, a_subtile);
        } else {
          write_cleared(writer, tile, row, column, parts, rows, a_subtile);
        }
        weight(a_subtile, rows);
        writer.write_subtile(Destination{a, stored_a, columns}, tile, row, column, a_subtile);
      }
    }
  }

  template <class Shape>
  __device__ void write_zeros(SubtileWriter& writer, const Tile& tile, int row) const {
    writer.write_zeros<Shape::kColumns / kParts>(Destination{a, stored_a, columns}, tile, row);
    if (!writes_h) return;
#pragma unroll
    for (int i = 0; i < kMapsOfH; ++i) {
      writer.write_zeros<Shape::kColumns / kMapsOfH>(Destination{h[i], stored_h[i], kScaleOfH * columns},
                                                     tile_of_h(tile), row);
    }
  }

 protected:
  using Values = SubtileValues<Element>;
  static constexpr int kScaleOfH = kParts / kMapsOfH;  // columns of a map of h per column of `a`

  struct Destination {
    using Out = Element;
    const CUtensorMap& map;
    const StoredRows& stored;
    int32_t columns;
    __device__ void send(uint32_t subtile, const Tile& tile, int row, int column) const {
      store_box(map, subtile, WindowCoordinates{tile.column + column, tile.row + row, tile.end_row});
    }
  };

  // Converts the columns of a tile to those of a map of h.
  static __device__ Tile tile_of_h(Tile tile) {
    tile.column *= kScaleOfH;
    return tile;
  }

  template <int kCount>
  __device__ __forceinline__ void weight(float (&values)[kCount], const RowPair& rows) const {
    if (weights.weights == nullptr) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] *= rows.weight[i / 2 % 2];
  }

  // Writes a subtile of h if it is requested, and computes `a` from it.
  __device__ __forceinline__ void write_h(SubtileWriter& writer, const Tile& tile, int row, int column,
                                          const float* const (&h_parts)[kParts],
                                          float (&result)[Values::kCount]) const {
    if (writes_h) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        writer.write_subtile(Destination{h[part], stored_h[part], columns}, tile, row, column, h_parts[part]);
      }
    }
    activate_columns(h_parts[0], h_parts[kParts - 1], result);
  }

  // Like write_h(), for accumulators with padding rows.
  __device__ __forceinline__ void write_cleared(SubtileWriter& writer, const Tile& tile, int row, int column,
                                                const float* const (&acc)[kParts], const RowPair& rows,
                                                float (&result)[Values::kCount]) const {
    Values gate(acc[0]);
    gate.clear_padding(rows);
    if constexpr (kParts == 2) {
      Values up(acc[1]);
      up.clear_padding(rows);
      write_h(writer, tile, row, column, {gate.values, up.values}, result);
    } else {
      write_h(writer, tile, row, column, {gate.values}, result);
    }
  }

  // Writes a subtile of h, if it is requested, and of `a`. Sixteen accumulators at a time take fewer registers. Padding
  // rows are cleared after the activation, which saves instructions: they may hold NaN until then.
  __device__ __forceinline__ void write_by_sixteens(SubtileWriter& writer, const Tile& tile, int row, int column,
                                                    const float* gate_acc, const float* up_acc, const RowPair& rows,
                                                    bool all_real) const {
    if (writes_h) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        Values values(part == 0 ? gate_acc : up_acc);
        if (!all_real) values.clear_padding(rows);
        writer.write_subtile(Destination{h[part], stored_h[part], columns}, tile, row, column, values.values);
      }
    }
    constexpr int kCount = 16;
    uint32_t words[Values::kCount / 2];
    with_common_formula(activation, [&]<Formula kFormula>() {
#pragma unroll
      for (int first = 0; first < Values::kCount; first += kCount) {
        float gate[kCount];
        float up[kCount];
        copy_accumulators(gate, gate_acc + first);
        copy_accumulators(up, up_acc + first);
        float result[kCount];
        activate_with<kFormula>(gate, up, result);
        weight(result, rows);
#pragma unroll
        for (int i = 0; i < kCount; i += 2) words[(first + i) / 2] = pack<Element>(result[i], result[i + 1]);
      }
    });
    if (!all_real) {
#pragma unroll
      for (int i = 0; i < Values::kCount / 2; ++i) {
        if (!rows.real[i % 2]) words[i] = 0;
      }
    }
    writer.write_packed_subtile(Destination{a, stored_a, columns}, tile, row, column, words);
  }

  // Like write_h(), for one subtile of interleaved columns, which `column` counts: every pair of accumulators is a
  // gate and an up value. words: half a subtile of `a`.
  __device__ __forceinline__ void write_pairs(SubtileWriter& writer, const Tile& tile, int row, int column,
                                              const float* acc, const RowPair& rows, bool all_real,
                                              uint32_t* words) const {
    constexpr int kCount = Values::kCount / 2;
    const Tile h_tile = tile_of_h(tile);
    const int32_t left = 2 * columns - h_tile.column - column;
    Values pairs(acc + column / 2);
    if (!all_real) pairs.clear_padding(rows);
    if (writes_h && left > 0) {
      writer.write_subtile(Destination{h[0], stored_h[0], 2 * columns}, h_tile, row, column, pairs.values);
    }
    // Rows i / 4 and i / 4 + 8 alternate; each has one value per 8 interleaved columns.
    float gate[kCount];
    float up[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      gate[i] = pairs.values[2 * i];
      up[i] = pairs.values[2 * i + 1];
    }
    float result[kCount];
    activate_columns(gate, up, result);
    if (weights.weights != nullptr) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) result[i] *= rows.weight[i % 2];
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        words[i / 2 + half] = gather_pair(pack<Element>(result[i + half], result[i + 2 + half]));
      }
    }
  }

  // Computes `a` from kCount gate and up values.
  template <int kCount>
  __device__ __forceinline__ void activate_columns(const float* gate, const float* up, float (&result)[kCount]) const {
    with_common_formula(activation, [&]<Formula kFormula>() { activate_with<kFormula>(gate, up, result); });
  }
  template <Formula kFormula, int kCount>
  __device__ __forceinline__ void activate_with(const float* gate, const float* up, float (&result)[kCount]) const {
    if constexpr (kFormula == Formula::any) {
#pragma unroll
      for (int i = 0; i < kCount; i += 2 * kPairs) activate_eight(gate + i, up + i, result + i);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) result[i] = activate<kFormula>(activation, gate[i], kParts == 2 ? up[i] : 1.0f);
    }
  }

  __device__ __forceinline__ void activate_eight(const float* gate, const float* up, float* result) const {
    uint32_t in[4][kPairs];
    uint32_t out[2][kPairs];
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      in[i % 2][i / 2] = bits_of(gate[i]);
      in[2 + i % 2][i / 2] = bits_of(kParts == 2 ? up[i] : 1.0f);
    }
    for_column_pairs<true>(in, out, [&](const uint32_t (&words)[4], uint32_t (&a_words)[2]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a_words[i] =
            bits_of(activate<Formula::any>(activation, float_from_bits(words[i]), float_from_bits(words[2 + i])));
      }
    });
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) result[i] = float_from_bits(out[i % 2][i / 2]);
  }
};

}  // namespace anabranch::cuda::hopper
