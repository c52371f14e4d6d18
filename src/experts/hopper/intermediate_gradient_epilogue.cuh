// Epilogue of da' = d_y W_out^T. Reads h and writes, for a row of weight w,
//
//     a = phi(h_gate, h_up), or act(h) for ungated experts;   w a;   dh = phi'(h) w da';   partial sums of <da', a>
//
// In every block of 32 columns, a lane holds 8 adjacent columns of 2 rows, so it reads and writes whole 16-byte chunks.
// The columns of W_out are loaded in shuffled order for this (ShuffledWeightOperand). Where they cannot be, the lanes
// exchange their accumulators. A lane's chunks of h are prefetched to shared memory, two blocks ahead. They take the
// place of the subtile buffers:
//
//   [kPrefetchedBlocks][2 rows][kParts][32 lanes] of 16 bytes per warp
#pragma once

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/shared.cuh"
#include "core/cuda/vector.cuh"
#include "experts/activation.h"
#include "experts/hopper/column_pairs.cuh"
#include "experts/hopper/fp8_row_quantizer.cuh"
#include "experts/hopper/gate_up_layout.h"
#include "experts/hopper/quads.cuh"
#include "experts/hopper/row_weights.cuh"
#include "experts/hopper/subtile_writer.cuh"
#include "experts/hopper/tile_choice.h"

namespace anabranch::cuda::hopper {

// kShuffled: W_out is loaded in shuffled column order. Quantizer: quantises dh if FP8 gradients are requested.
template <class Element, GateUpLayout kLayout, bool kShuffled, class Quantizer = NoQuantizer>
struct IntermediateGradientEpilogue {
  static constexpr int kParts = parts_of(kLayout);
  static constexpr bool kInterleaved = kLayout == GateUpLayout::interleaved;

  const Element* h;     // [R, kParts, F], or [R, F, 2]
  Element* dh;          // same shape; may alias h; or nullptr
  Element* weighted_a;  // [R, F], or nullptr
  float* dots;          // [F / kSumColumns, R]: partial sums of <da', a>; or nullptr
  RowWeights weights;
  int32_t columns;  // F
  int32_t R;
  Activation activation;
  Quantizer quantizer;  // occupies space even if empty: host and device disagree on [[no_unique_address]]

  template <class Shape>
  static constexpr bool kNeedsRegisters = !kShuffled;
  static constexpr bool kNeedsPositionRegister = !kShuffled;
  static constexpr bool kWritesFromOneBuffer = false;
  static constexpr bool kDefersStores = false;

  __device__ void prefetch_maps() const {}

  // Weights of a warp's rows. Assignments are read before the main loop, weights during its last MMAs.
  template <class Shape>
  struct Prefetched {
    RowSlots slots[Shape::kWarpgroupPanels];
    RowPair rows[Shape::kWarpgroupPanels];
  };

  // Starts to read the first blocks of h and the assignments of all panels.
  template <class Shape>
  __device__ Prefetched<Shape> begin_prefetch(const SubtileWriter& writer, const Tile& tile, int row) const {
    static_assert(kPrefetchedBlocks * kBlockBytes <= Shape::kSubtileBuffers * kSubtileBytes,
                  "the prefetched blocks of h must fit the subtile buffers");
    begin_panel(writer, tile, row);
    Prefetched<Shape> prefetched;
#pragma unroll
    for (int panel = 0; panel < Shape::kWarpgroupPanels; ++panel) {
      prefetched.slots[panel] = RowSlots(weights, tile, row + panel * kPanel);
    }
    return prefetched;
  }

  template <class Shape>
  __device__ __forceinline__ void finish_prefetch(Prefetched<Shape>& prefetched) const {
#pragma unroll
    for (int panel = 0; panel < Shape::kWarpgroupPanels; ++panel) {
      prefetched.rows[panel] = RowPair(weights, prefetched.slots[panel]);
    }
  }

  template <class Shape>
  __device__ void write(SubtileWriter& writer, const Tile& tile, int row, int panel, float (&acc)[Shape::kColumns / 2],
                        const Prefetched<Shape>& prefetched) const {
    static_assert(Shape::kWarpgroupPanels == 1 || Shape::kTileWarpgroups == 1,
                  "a warpgroup with several panels must not share its tile");
    if constexpr (!kShuffled)
      row = __shfl_sync(kAllLanes, row, 0);  // warp-uniform for the compiler, so it takes no register per lane
    if (tile.row + row < tile.end_row) {
      with_common_formula(activation, [&]<Formula kFormula>() {
        write_differentiated<Shape, kFormula>(writer, tile, row, acc, prefetched.rows[panel]);
      });
    }
    wait_for_copies<0>();
    if (Shape::kWarpgroupPanels > 1 && row + kPanel < Shape::kRows) begin_panel(writer, tile, row + kPanel);
  }

  // Writes zeros to the rows after the groups.
  template <class Shape>
  __device__ void write_zeros(SubtileWriter&, const Tile& tile, int row) const {
    wait_for_copies<0>();
    constexpr float kZeros[8] = {};
    const Places places(*this, tile, row);
#pragma unroll 1
    for (int column = 0; column < Shape::kColumns; column += kBlock) {
      for (int half = 0; half < 2; ++half) {
        const bool in_bounds = places.is_in_bounds(half, column);
        for (int chunk = 0; chunk < kParts; ++chunk) {
          Eight::from(kZeros).store_if(in_bounds && dh != nullptr, dh + places.h_offset(half, chunk, column));
        }
        Eight::from(kZeros).store_if(in_bounds && weighted_a != nullptr, weighted_a + places.a_offset(half, column));
      }
    }
    if constexpr (kQuantizes) {
      const float nothing[64] = {};
#pragma unroll 1
      for (int column = 0; column < Shape::kColumns; column += kScaled) {
        quantizer.write(nothing, row_of(tile, row, 0), tile.column + column,
                        {places.is_in_bounds(0, column), places.is_in_bounds(1, column)});
      }
    }
    if (dots == nullptr) return;
#pragma unroll 1
    for (int column = 0; column < Shape::kColumns && tile.column + column < columns; column += kSumColumns<Shape>) {
      write_dots<Shape>(tile, row, column, {0.0f, 0.0f}, {false, false});
    }
  }

 private:
  using Eight = Vector<Element, 8>;

  static constexpr bool kQuantizes = !std::is_same_v<Quantizer, NoQuantizer>;
  static constexpr int kScaled = 128;  // columns that share a scale

  // Columns of a partial sum of <da', a>. With 16-bit operands tiles have 128 or 256 columns, and sums do not depend on
  // the choice.
  template <class Shape>
  static constexpr int kSumColumns = kQuantizes ? Shape::kColumns : kDotColumns;

  static constexpr int kBlock = 32;  // 8 columns per lane
  static constexpr int kPrefetchedBlocks = 2;
  static constexpr int kBlockBytes = 2 * 2 * kWarp * 16;

  // One block of h: a chunk each of gate and up, or (interleaved) the first and the last 4 column pairs.
  struct BlockOfH {
    Eight h[2][kParts];  // rows i / 4 and i / 4 + 8

    // Returns the gates or the ups of two columns; interleaved: gate and up of one of the two columns.
    __device__ __forceinline__ uint32_t word(int half, int i, int pair) const {
      return kInterleaved ? h[half][pair / 2].word(pair % 2 * 2 + i) : h[half][i].word(pair);
    }
  };

  // Positions of the lane's first column in its two rows.
  struct Places {
    const IntermediateGradientEpilogue& out;
    int64_t first;            // element of the upper row in [R, F]
    int32_t column;           // first column of the lane
    int32_t columns_left[2];  // 0 for rows after the expert's rows

    __device__ Places(const IntermediateGradientEpilogue& epilogue, const Tile& tile, int row)
        : out(epilogue),
          first(int64_t{row_of(tile, row, 0)} * epilogue.columns),
          column(tile.column + lane_index() % 4 * 8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        columns_left[half] = row_of(tile, row, half) < tile.end_row ? out.columns - column : 0;
      }
    }

    // Whether the column `after` columns after `column` is in bounds.
    __device__ bool is_in_bounds(int half, int after) const { return after < columns_left[half]; }

    // Element offsets in [R, F] and in h.
    __device__ int64_t a_offset(int half, int after) const {
      return first + half * 8 * int64_t{out.columns} + column + after;
    }
    __device__ int64_t h_offset(int half, int chunk, int after) const {
      const int64_t row = kParts * (first + half * 8 * int64_t{out.columns});
      if constexpr (kInterleaved) return row + 2 * (column + after) + chunk * 8;
      return row + chunk * int64_t{out.columns} + column + after;
    }

    // Forces the compiler to recompute addresses: holding all of them would exceed the registers.
    __device__ __forceinline__ void forget() { asm volatile("" : "+l"(first)); }
  };

  static __device__ int32_t row_of(const Tile& tile, int row, int half) {
    return tile.row + row + half * 8 + lane_index() / 4;
  }

  // Address of a lane's chunk in its warp's prefetch buffer.
  static __device__ __forceinline__ uint32_t chunk_of(const SubtileWriter& writer, int block, int half, int chunk) {
    const uint32_t first = writer.subtiles() + static_cast<uint32_t>(lane_index()) * 16;  // everything else is constant
    return first + block % kPrefetchedBlocks * kBlockBytes + (half * kParts + chunk) * kWarp * 16;
  }

  __device__ void begin_panel(const SubtileWriter& writer, const Tile& tile, int row) const {
    const Places places(*this, tile, row);
#pragma unroll
    for (int block = 0; block < kPrefetchedBlocks; ++block) read(writer, places, block);
  }

  // Starts to copy one block of h. Writes zeros out of bounds.
  __device__ __forceinline__ void read(const SubtileWriter& writer, const Places& places, int block) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool in_bounds = places.is_in_bounds(half, block * kBlock);
#pragma unroll
      for (int chunk = 0; chunk < kParts; ++chunk) {
        const Element* from = h + (in_bounds ? places.h_offset(half, chunk, block * kBlock) : 0);
        copy_async_16(chunk_of(writer, block, half, chunk), from, in_bounds);
      }
    }
    end_copy_group();
  }

  template <class Shape, Formula kFormula>
  __device__ __forceinline__ void write_differentiated(const SubtileWriter& writer, const Tile& tile, int row,
                                                       float (&acc)[Shape::kColumns / 2], const RowPair& rows) const {
    Places places(*this, tile, row);
    float dot[2] = {0.0f, 0.0f};
    constexpr int kBlocks = Shape::kColumns / kBlock;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      places.forget();
      if (block < kBlocks - 1) {
        wait_for_copies<kPrefetchedBlocks - 1>();
      } else {
        wait_for_copies<0>();
      }
      BlockOfH now;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int chunk = 0; chunk < kParts; ++chunk) {
          now.h[half][chunk].bytes = load_shared<uint4>(chunk_of(writer, block, half, chunk));
        }
      }
      if (block + kPrefetchedBlocks < kBlocks) read(writer, places, block + kPrefetchedBlocks);
      float da[kBlock / 2];
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i) da[i] = acc[block * kBlock / 2 + i];
      if constexpr (!kShuffled) transpose_quad(da);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (places.is_in_bounds(half, block * kBlock)) {
          write_eight<kFormula>(places, half, block * kBlock, da + half * 2, now, rows, dot[half],
                                acc + block * kBlock / 2);
        }
      }
      if constexpr (kQuantizes) {
        if (block % (kScaled / kBlock) == kScaled / kBlock - 1) {
          const int column = (block + 1) * kBlock - kScaled;
          quantizer.write(acc + column / 2, row_of(tile, row, 0), tile.column + column,
                          {places.is_in_bounds(0, column), places.is_in_bounds(1, column)});
        }
      }
      const int sum_column = (block + 1) * kBlock - kSumColumns<Shape>;
      // Resetting the sums within this branch saves registers.
      if (sum_column % kSumColumns<Shape> == 0 && tile.column + sum_column < columns) {
        if (dots != nullptr) write_dots<Shape>(tile, row, sum_column, dot, rows.real);
        dot[0] = dot[1] = 0.0f;
      }
    }
  }

  // Computes and stores 8 columns of a row. acc: 4 pairs of adjacent columns, at a stride of 4.
  template <Formula kFormula>
  __device__ __forceinline__ void write_eight(const Places& places, int half, int column, const float* acc,
                                              const BlockOfH& now, const RowPair& rows, float& dot,
                                              float* saved) const {
    const float weight = rows.weight[half];
    uint32_t in[2 + kParts][kPairs];   // da' of the first and of the second column of each pair, then h
    uint32_t out[kParts + 1][kPairs];  // dh, w a
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int i = 0; i < 2; ++i) in[i][pair] = bits_of(acc[pair * 4 + i]);
#pragma unroll
      for (int i = 0; i < kParts; ++i) in[2 + i][pair] = now.word(half, i, pair);
    }
    for_column_pairs<kFormula == Formula::any>(
        in, out, [&](const uint32_t (&words)[2 + kParts], uint32_t (&result)[kParts + 1]) {
          Differentiated at[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float gate = kInterleaved ? half_of(words[2 + i], 0) : half_of(words[2], i);
            const float up = kInterleaved  ? half_of(words[2 + i], 1)
                             : kParts == 2 ? half_of(words[1 + kParts], i)
                                           : 1.0f;
            at[i] = differentiate<kFormula>(float_from_bits(words[i]), weight, gate, up, dot);
          }
          if constexpr (kInterleaved) {
#pragma unroll
            for (int i = 0; i < 2; ++i) result[i] = pack<Element>(at[i].d_gate, at[i].d_up);
          } else {
            result[0] = pack<Element>(at[0].d_gate, at[1].d_gate);
            if constexpr (kParts == 2) result[1] = pack<Element>(at[0].d_up, at[1].d_up);
          }
          result[kParts] = pack<Element>(at[0].weighted_a, at[1].weighted_a);
        });
    quantizer.save(saved, half, rows.real[half], [&](int part, int i) {
      if constexpr (!kInterleaved) return out[part][i];
      return __byte_perm(out[0][i], out[1][i], part == 0 ? 0x5410 : 0x7632);
    });
#pragma unroll
    for (int chunk = 0; chunk < kParts; ++chunk) {
      uint32_t words[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) words[i] = kInterleaved ? out[i % 2][chunk * 2 + i / 2] : out[chunk][i];
      Eight::from_words(words)
          .or_zeros(rows.real[half])
          .store_if(dh != nullptr, dh + places.h_offset(half, chunk, column));
    }
    Eight::from_words(out[kParts])
        .or_zeros(rows.real[half])
        .store_if(weighted_a != nullptr, weighted_a + places.a_offset(half, column));
  }

  static __device__ __forceinline__ float half_of(uint32_t word, int i) {
    return i == 0 ? low_half<Element>(word) : high_half<Element>(word);
  }

  // Results for one column.
  struct Differentiated {
    float d_gate;
    float d_up;
    float weighted_a;
  };
  template <Formula kFormula>
  __device__ __forceinline__ Differentiated differentiate(float da, float weight, float gate, float up,
                                                          float& dot) const {
    const ActivationAt at = activate_with_slopes<kFormula>(activation, gate, up);
    const float weighted = da * weight;
    dot = fmaf(da, at.value, dot);
    return {weighted * at.by_gate, weighted * at.by_up, weight * at.value};
  }

  // Writes the partial sums of <da', a> over kSumColumns columns of the tile, from `column` on.
  template <class Shape>
  __device__ void write_dots(const Tile& tile, int row, int column, const float (&dot)[2],
                             const bool (&real)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = real[half] ? dot[half] : 0.0f;
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const int32_t at = row_of(tile, row, half);
      if (lane_index() % 4 == 0 && at < tile.end_row) {
        dots[static_cast<int64_t>((tile.column + column) / kSumColumns<Shape>) * R + at] = sum;
      }
    }
  }
};

}  // namespace anabranch::cuda::hopper
