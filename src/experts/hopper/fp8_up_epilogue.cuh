// Epilogue of the FP8 up GEMM: writes h like UpEpilogue, and `a` in e4m3 with one scale per row and 128 columns. An
// adapter of W_out also needs `a` in 16 bits.
#pragma once

#include "experts/cuda/ops/fp8.cuh"
#include "experts/hopper/scaled_mainloop.cuh"
#include "experts/hopper/up_epilogue.cuh"

namespace anabranch::cuda::hopper {

// In tiles, gate and up are always two halves, whatever their layout in h and the bias. Tensor maps of `a` count pairs
// of elements. In interleaved h, a gate and its up value count as one 32-bit element.
template <class Element, GateUpLayout kLayout, bool kHasAdapter>
struct Fp8UpEpilogue : UpEpilogue<Element, kLayout> {
  using Base = UpEpilogue<Element, kLayout>;
  using Base::kParts;

  static constexpr bool kInterleaved = kLayout == GateUpLayout::interleaved;
  using ElementOfH = std::conditional_t<kInterleaved, float, Element>;

  float* scales;  // of `a`: [R, F / 128]
  bool power_of_two;
  const Element* bias;                                              // [E, kParts, F], or [E, F, 2]; or nullptr
  std::conditional_t<kHasAdapter, bool, std::false_type> writes_a;  // in 16 bits too
  CUtensorMap a_16_bit;                                             // row window, boxes of a subtile

  __device__ void prefetch_maps() const {
    prefetch_map(this->a);
    if (writes_a) prefetch_map(a_16_bit);
    if (!this->writes_h) return;
#pragma unroll
    for (const CUtensorMap& map : this->h) prefetch_map(map);
  }

  // Computes `a` in place of the accumulators, because no other registers are free.
  template <class Shape>
  __device__ void write(SubtileWriter& writer, const Tile& tile, int row, int, float (&acc)[Shape::kColumns / 2],
                        EmptyPrefetch) const {
    if (tile.row + row >= tile.end_row) return;
    constexpr int kWidth = Shape::kColumns / kParts;
    const RowPair rows(this->weights, tile, row);
    if (bias != nullptr) add_bias<kWidth>(tile, acc);
#pragma unroll
    for (int block = 0; block < kWidth; block += kScaleBlock) {
      if (tile.column + block >= this->columns) return;
      float (&a)[kScaleBlock / 2] = *reinterpret_cast<float (*)[kScaleBlock / 2]>(acc + block / 2);
#pragma unroll
      for (int column = block; column < block + kScaleBlock; column += kSubtileColumns<Element>) {
        const float* parts[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) parts[part] = acc + (part * kWidth + column) / 2;
        float subtile[Values::kCount];
        write_h(writer, tile, row, column, parts, rows);
        this->activate_columns(parts[0], parts[kParts - 1], subtile);
        this->weight(subtile, rows);
#pragma unroll
        for (int i = 0; i < Values::kCount; ++i) acc[column / 2 + i] = subtile[i];
      }
      write_quantized(writer, tile, row, block, a, rows);
      if (writes_a) {
#pragma unroll
        for (int column = 0; column < kScaleBlock; column += kSubtileColumns<Element>) {
          write_masked(writer, tile, row, block + column, a + column / 2, rows, a_16_bit);
        }
      }
    }
  }

  template <class Shape>
  __device__ void write_zeros(SubtileWriter& writer, const Tile& tile, int row) const {
    constexpr int kWidth = Shape::kColumns / kParts;
    writer.write_zeros<kWidth / 2>(Pairs{this->a, this->columns / 2}, in_pairs(tile), row);
    for (int block = 0; block < kWidth; block += kScaleBlock) write_scales(tile, row, block, {1.0f, 1.0f});
    if (writes_a) writer.write_zeros<kWidth>(RowsOf<Element>{a_16_bit, this->columns}, tile, row);
    if (!this->writes_h) return;
#pragma unroll
    for (const CUtensorMap& map : this->h) {
      writer.write_zeros<kWidth>(RowsOfH{map, this->columns}, tile, row);
    }
  }

 private:
  using Values = SubtileValues<Element>;

  template <class Element_>
  struct RowsOf {
    using Out = Element_;
    const CUtensorMap& map;
    int32_t columns;
    __device__ void send(uint32_t subtile, const Tile& tile, int row, int column) const {
      store_box(map, subtile, WindowCoordinates{tile.column + column, tile.row + row, tile.end_row});
    }
  };
  using Pairs = RowsOf<BFloat16>;  // same size as two elements of `a`
  using RowsOfH = RowsOf<ElementOfH>;
  static __device__ Tile in_pairs(Tile tile) {
    tile.column /= 2;
    return tile;
  }

  __device__ __forceinline__ void write_scales(const Tile& tile, int row, int column, const float (&of)[2]) const {
    const int32_t blocks = this->columns / kScaleBlock;
    const int32_t block = (tile.column + column) / kScaleBlock;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t at = tile.row + row + half * 8 + lane_index() / 4;
      if (lane_index() % 4 == 0 && at < tile.end_row && block < blocks) scales[int64_t{at} * blocks + block] = of[half];
    }
  }

  // 0 for padding rows, all ones for others.
  static __device__ __forceinline__ uint32_t mask_of(const RowPair& rows, int half) {
    return rows.real[half] ? 0xffffffffu : 0u;
  }

  // Writes a subtile of rows of F elements. Padding rows are zero.
  __device__ __forceinline__ void write_masked(SubtileWriter& writer, const Tile& tile, int row, int column,
                                               const float* values, const RowPair& rows, const CUtensorMap& map) const {
    uint32_t words[Values::kCount / 2];
#pragma unroll
    for (int i = 0; i < Values::kCount / 2; ++i) {
      words[i] = pack<Element>(values[2 * i], values[2 * i + 1]) & mask_of(rows, i % 2);
    }
    writer.write_packed_subtile(RowsOf<Element>{map, this->columns}, tile, row, column, words);
  }

  // Writes a subtile of h if it is requested.
  __device__ __forceinline__ void write_h(SubtileWriter& writer, const Tile& tile, int row, int column,
                                          const float* const (&h_parts)[kParts], const RowPair& rows) const {
    if (!this->writes_h) return;
    if constexpr (kInterleaved) {
      constexpr int kColumns = kSubtileColumns<float>;
#pragma unroll
      for (int first = 0; first < kSubtileColumns<Element>; first += kColumns) {
        float words[kColumns / 2];
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
          const uint32_t word = pack<Element>(h_parts[0][first / 2 + i], h_parts[1][first / 2 + i]);
          words[i] = float_from_bits(word & mask_of(rows, i / 2 % 2));
        }
        writer.write_subtile(RowsOfH{this->h[0], this->columns}, tile, row, column + first, words);
      }
    } else {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        write_masked(writer, tile, row, column, h_parts[part], rows, this->h[part]);
      }
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void add_bias(const Tile& tile, float (&acc)[kParts * kWidth / 2]) const {
    const int64_t expert_offset = int64_t{tile.expert} * kParts * this->columns;
#pragma unroll
    for (int i = 0; i < kWidth / 2; i += 4) {
      const int32_t column = tile.column + i * 2 + lane_index() % 4 * 2;
      if (column >= this->columns) continue;
      uint32_t words[kParts];  // bias of the lane's two columns
      if constexpr (kInterleaved) {
        const auto both = *reinterpret_cast<const uint2*>(bias + expert_offset + 2 * column);
        words[0] = __byte_perm(both.x, both.y, 0x5410);
        words[1] = __byte_perm(both.x, both.y, 0x7632);
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          words[part] = *reinterpret_cast<const uint32_t*>(bias + expert_offset + part * this->columns + column);
        }
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          acc[part * kWidth / 2 + i + j] +=
              j % 2 == 0 ? low_half<Element>(words[part]) : high_half<Element>(words[part]);
        }
      }
    }
  }

  // Quantises 128 columns of `a`. The lane holds 2 of every 8 columns, in two rows.
  __device__ __forceinline__ void write_quantized(SubtileWriter& writer, const Tile& tile, int row, int column,
                                                  const float (&a)[kScaleBlock / 2], const RowPair& rows) const {
    uint32_t largest[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kScaleBlock / 2; ++i) {
      uint32_t& row_largest = largest[i / 2 % 2];
      row_largest = max(row_largest, magnitude_bits(a[i]));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t& row_largest = largest[i];
      row_largest &= mask_of(rows, i);
      row_largest = max(row_largest, __shfl_xor_sync(kAllLanes, row_largest, 1));
      row_largest = max(row_largest, __shfl_xor_sync(kAllLanes, row_largest, 2));
    }
    const Fp8Scaler scaler[2] = {{largest[0], power_of_two}, {largest[1], power_of_two}};
    write_scales(tile, row, column, {scaler[0].scale(), scaler[1].scale()});
    // The lane has two pairs per 16 columns. gather_pair() moves two adjacent pairs into one word, as the writer
    // expects.
    uint32_t words[kScaleBlock / 8];
#pragma unroll
    for (int i = 0; i < kScaleBlock / 8; ++i) {
      const int first = i / 2 * 8 + i % 2 * 2;
      const Fp8Scaler& row_scaler = scaler[i % 2];
      const uint32_t pairs = row_scaler.pack(a[first], a[first + 1]) | row_scaler.pack(a[first + 4], a[first + 5])
                                                                           << 16;
      words[i] = gather_pair(pairs & mask_of(rows, i % 2));
    }
    writer.write_packed_subtile(Pairs{this->a, this->columns / 2}, in_pairs(tile), row, column / 2, words);
  }
};

}  // namespace anabranch::cuda::hopper
