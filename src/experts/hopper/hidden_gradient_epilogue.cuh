// The epilogue of the product da' = d_y W_out^T: reads h and writes, with w the row's weight,
//
//     a = phi(h_gate, h_up), or act(h) of ungated experts;   w a;   dh = phi'(h) w da';   dots = <da', a>
//
// Of every 32 columns of the tile, a block, a lane has 8 neighbours of 2 rows: it reads and writes whole 16-byte chunks
// of its own. For that the columns of W_out come shuffled (ShuffledWeightOperand), or, if they can't, the lanes
// exchange their accumulators. A lane's chunks of h come through shared memory, in the place of the subtiles, two
// blocks ahead of the one it works on:
//
//   [kPrefetchedBlocks][2 rows][kParts][32 lanes] of 16 bytes for each warp
#pragma once

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/shared.cuh"
#include "core/cuda/vector.cuh"
#include "experts/activation.h"
#include "experts/hopper/column_pairs.cuh"
#include "experts/hopper/fp8_row_quantizer.cuh"
#include "experts/hopper/hidden_columns.h"
#include "experts/hopper/quads.cuh"
#include "experts/hopper/row_weights.cuh"
#include "experts/hopper/subtile_writer.cuh"

namespace anabranch::cuda::hopper {

// kShuffled: the columns of W_out are. Quantizer: of dh, where it is wanted with 8 bits too.
template <class Element, HiddenColumns kHidden, bool kShuffled, class Quantizer = QuantizesNothing>
struct HiddenGradientEpilogue {
  static constexpr int kParts = parts_of(kHidden);
  static constexpr bool kInterleaved = kHidden == HiddenColumns::interleaved;

  const Element* h;     // [R, kParts, F], or [R, F, 2]
  Element* dh;          // the same, may be h itself; or nullptr
  Element* weighted_a;  // [R, F], or nullptr
  float* dots;          // [columns of tiles, R]: each tile's part; or nullptr
  RowWeights weights;
  int32_t columns;  // F
  int32_t R;
  Activation activation;
  Quantizer quantizer;  // takes room even if empty: host and device disagree on [[no_unique_address]]

  template <class Shape>
  static constexpr bool kTakesRegisters = !kShuffled;
  static constexpr bool kTakesPosition = !kShuffled;
  static constexpr bool kKeeps = false;

  __device__ void prefetch_maps() const {}

  // The weights of a warp's rows: slots are read before the products begin, weights during the last ones.
  template <class Shape>
  struct Prefetched {
    RowSlots slots[Shape::kWarpgroupPanels];
    RowPair rows[Shape::kWarpgroupPanels];
  };

  // Starts to read the first blocks of h, and the slots of all panels.
  template <class Shape>
  __device__ Prefetched<Shape> begin_prefetch(const SubtileWriter& writer, const Tile& tile, int row) const {
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
                  "a warpgroup with several panels has the tile alone");
    if constexpr (!kShuffled) row = __shfl_sync(kAllLanes, row, 0);  // known to be the warp's, it takes no registers
    if (tile.row + row < tile.end_row) {
      with_common_formula(activation, [&]<Formula kFormula>() {
        write_differentiated<Shape, kFormula>(writer, tile, row, acc, prefetched.rows[panel]);
      });
    }
    wait_for_copies<0>();
    if (Shape::kWarpgroupPanels > 1 && row + kPanel < Shape::kRows) begin_panel(writer, tile, row + kPanel);
  }

  // Rows past the groups.
  template <class Shape>
  __device__ void write_zeros(SubtileWriter&, const Tile& tile, int row) const {
    wait_for_copies<0>();
    constexpr float kZeros[8] = {};
    const Places places(*this, tile, row);
#pragma unroll 1
    for (int column = 0; column < Shape::kColumns; column += kBlock) {
      for (int half = 0; half < 2; ++half) {
        const bool there = places.reach(half, column);
        for (int chunk = 0; chunk < kParts; ++chunk) {
          Eight::from(kZeros).store_if(there && dh != nullptr, dh + places.of_h(half, chunk, column));
        }
        Eight::from(kZeros).store_if(there && weighted_a != nullptr, weighted_a + places.of_a(half, column));
      }
    }
    if constexpr (kQuantizes) {
      const float nothing[64] = {};
#pragma unroll 1
      for (int column = 0; column < Shape::kColumns; column += kScaled) {
        quantizer.write(nothing, row_of(tile, row, 0), tile.column + column,
                        {places.reach(0, column), places.reach(1, column)});
      }
    }
    if (dots != nullptr) write_dots<Shape>(tile, row, {0.0f, 0.0f}, {false, false});
  }

 private:
  using Eight = Vector<Element, 8>;

  static constexpr bool kQuantizes = !std::is_same_v<Quantizer, QuantizesNothing>;
  static constexpr int kScaled = 128;  // columns that are quantised together

  static constexpr int kBlock = 32;            // columns that the lanes of a row have 8 each of
  static constexpr int kPrefetchedBlocks = 2;  // blocks
  static constexpr int kBlockBytes = 2 * 2 * kWarp * 16;
  static_assert(kPrefetchedBlocks * kBlockBytes <= kSubtileBuffers * kSubtileBytes,
                "prefetched blocks of h fit the subtile buffers");

  // h of a block: of gate and up a chunk each, or of the first and of the last 4 columns.
  struct Hidden {
    Eight h[2][kParts];  // rows i / 4 and i / 4 + 8

    // Of two columns the gates and the ups, or gate and up of one and of the other.
    __device__ __forceinline__ uint32_t word(int half, int i, int pair) const {
      return kInterleaved ? h[half][pair / 2].word(pair % 2 * 2 + i) : h[half][i].word(pair);
    }
  };

  // Where a lane's first columns stand, of each of its two rows.
  struct Places {
    const HiddenGradientEpilogue& out;
    int64_t first;            // element of the upper row in [R, F]
    int32_t column;           // of the lane's first one
    int32_t columns_left[2];  // none for a row that is not the expert's

    __device__ Places(const HiddenGradientEpilogue& epilogue, const Tile& tile, int row)
        : out(epilogue),
          first(int64_t{row_of(tile, row, 0)} * epilogue.columns),
          column(tile.column + lane_index() % 4 * 8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        columns_left[half] = row_of(tile, row, half) < tile.end_row ? out.columns - column : 0;
      }
    }

    // Whether there are columns so many on.
    __device__ bool reach(int half, int after) const { return after < columns_left[half]; }

    // Elements of [R, F], and of a chunk of h.
    __device__ int64_t of_a(int half, int after) const {
      return first + half * 8 * int64_t{out.columns} + column + after;
    }
    __device__ int64_t of_h(int half, int chunk, int after) const {
      const int64_t row = kParts * (first + half * 8 * int64_t{out.columns});
      if constexpr (kInterleaved) return row + 2 * (column + after) + chunk * 8;
      return row + chunk * int64_t{out.columns} + column + after;
    }

    // Places are found anew from here on: kept, all of them would take more registers than there are.
    __device__ __forceinline__ void forget() { asm volatile("" : "+l"(first)); }
  };

  static __device__ int32_t row_of(const Tile& tile, int row, int half) {
    return tile.row + row + half * 8 + lane_index() / 4;
  }

  // A lane's chunk in its warp's memory.
  static __device__ __forceinline__ uint32_t chunk_of(const SubtileWriter& writer, int block, int half, int chunk) {
    const uint32_t first = writer.subtiles() + static_cast<uint32_t>(lane_index()) * 16;  // the rest is constant
    return first + block % kPrefetchedBlocks * kBlockBytes + (half * kParts + chunk) * kWarp * 16;
  }

  __device__ void begin_panel(const SubtileWriter& writer, const Tile& tile, int row) const {
    const Places places(*this, tile, row);
#pragma unroll
    for (int block = 0; block < kPrefetchedBlocks; ++block) read(writer, places, block);
  }

  // Zeros where there is nothing to read.
  __device__ __forceinline__ void read(const SubtileWriter& writer, const Places& places, int block) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = places.reach(half, block * kBlock);
#pragma unroll
      for (int chunk = 0; chunk < kParts; ++chunk) {
        const Element* from = h + (there ? places.of_h(half, chunk, block * kBlock) : 0);
        copy_async_16(chunk_of(writer, block, half, chunk), from, there);
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
      Hidden now;
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
      if constexpr (!kShuffled) take_neighbours(da);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (places.reach(half, block * kBlock)) {
          write_eight<kFormula>(places, half, block * kBlock, da + half * 2, now, rows, dot[half],
                                acc + block * kBlock / 2);
        }
      }
      if constexpr (kQuantizes) {
        if (block % (kScaled / kBlock) != kScaled / kBlock - 1) continue;
        const int column = (block + 1) * kBlock - kScaled;
        quantizer.write(acc + column / 2, row_of(tile, row, 0), tile.column + column,
                        {places.reach(0, column), places.reach(1, column)});
      }
    }
    if (dots != nullptr) write_dots<Shape>(tile, row, dot, rows.real);
  }

  // Of 8 columns of a row. acc: 4 neighbouring pairs of columns, 4 apart.
  template <Formula kFormula>
  __device__ __forceinline__ void write_eight(const Places& places, int half, int column, const float* acc,
                                              const Hidden& now, const RowPair& rows, float& dot, float* kept) const {
    const float weight = rows.weight[half];
    uint32_t in[2 + kParts][kPairs];   // da' of the first columns and of the second ones, h
    uint32_t out[kParts + 1][kPairs];  // dh, w a
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int i = 0; i < 2; ++i) in[i][pair] = bits_of(acc[pair * 4 + i]);
#pragma unroll
      for (int i = 0; i < kParts; ++i) in[2 + i][pair] = now.word(half, i, pair);
    }
    for_column_pairs<kFormula == Formula::any>(
        in, out, [&](const uint32_t (&of)[2 + kParts], uint32_t (&result)[kParts + 1]) {
          Differentiated at[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float gate = kInterleaved ? half_of(of[2 + i], 0) : half_of(of[2], i);
            const float up = kInterleaved ? half_of(of[2 + i], 1) : kParts == 2 ? half_of(of[1 + kParts], i) : 1.0f;
            at[i] = differentiate<kFormula>(float_from_bits(of[i]), weight, gate, up, dot);
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
    quantizer.keep(kept, half, rows.real[half], [&](int part, int i) {
      if constexpr (!kInterleaved) return out[part][i];
      return __byte_perm(out[0][i], out[1][i], part == 0 ? 0x5410 : 0x7632);
    });
#pragma unroll
    for (int chunk = 0; chunk < kParts; ++chunk) {
      uint32_t words[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) words[i] = kInterleaved ? out[i % 2][chunk * 2 + i / 2] : out[chunk][i];
      Eight::of_words(words).or_zeros(rows.real[half]).store_if(dh != nullptr, dh + places.of_h(half, chunk, column));
    }
    Eight::of_words(out[kParts])
        .or_zeros(rows.real[half])
        .store_if(weighted_a != nullptr, weighted_a + places.of_a(half, column));
  }

  static __device__ __forceinline__ float half_of(uint32_t word, int i) {
    return i == 0 ? low_half<Element>(word) : high_half<Element>(word);
  }

  // Of one column.
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

  // Of the columns of this tile.
  template <class Shape>
  __device__ void write_dots(const Tile& tile, int row, const float (&dot)[2], const bool (&real)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = real[half] ? dot[half] : 0.0f;
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const int32_t at = row_of(tile, row, half);
      if (lane_index() % 4 == 0 && at < tile.end_row) {
        dots[static_cast<int64_t>(tile.column / Shape::kColumns) * R + at] = sum;
      }
    }
  }
};

}  // namespace anabranch::cuda::hopper
