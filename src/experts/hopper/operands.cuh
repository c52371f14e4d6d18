// Operands of a tile: each loads the panels of one k-block into shared memory.
//
// load() is called by one thread. It issues loads that complete on `barrier`, which expects the bytes of all panels,
// including those that other CTAs of the cluster multicast. With kGathered, the four warps of the producer warpgroup
// copy the operand instead, see Gather; with kPacked they also decode it (packed_operand.cuh). prefetch_maps() is
// called before the first load.
#pragma once

#include "core/cuda/tma.cuh"
#include "experts/hopper/gather.cuh"
#include "experts/hopper/tile_shape.cuh"

namespace anabranch::cuda::hopper {

struct LoadedByTma {
  static constexpr bool kGathered = false;
  static constexpr bool kPacked = false;
  static constexpr bool kMayHaveBias = false;
  static constexpr bool kMayHaveLowRank = false;
  static constexpr bool kScaled = false;
  template <int, bool = false>
  using Gather = NoGather;

  // Bytes that load() transfers for kSides rows or columns of a tile.
  template <int kSides>
  __device__ static constexpr uint32_t bytes(const Tile&) {
    return kSides * kSwizzleBytes;
  }
};

struct LoadedByThreads : GatherSource {
  static constexpr bool kGathered = true;
  static constexpr bool kPacked = false;
  static constexpr bool kMayHaveBias = false;
  static constexpr bool kMayHaveLowRank = false;
  static constexpr bool kScaled = false;

  __device__ void prefetch_maps() const {}

  template <int>
  __device__ static constexpr uint32_t bytes(const Tile&) {
    return 0;
  }
  template <int, class AnyMulticast>
  __device__ void load(uint32_t, Barrier&, const Tile&, int, const AnyMulticast&) const {}
};

// Operand A of a GEMM over rows: rows of a matrix [R, D]; rows of other experts are zero. For tiles with few rows, the
// remaining rows keep stale shared memory: loading zeros would cost TMA as much time as loading rows.
struct RowOperand : LoadedByTma {
  static constexpr Major kMajor = Major::k;
  static constexpr int kFewRows = 32;
  CUtensorMap map;           // row window, boxes [kRows][64]
  CUtensorMap few_rows_map;  // the same row window, boxes [kFewRows][64]

  __device__ void prefetch_maps() const {
    prefetch_map(map);
    prefetch_map(few_rows_map);
  }

  template <int kRows>
  __device__ static uint32_t bytes(const Tile& tile) {
    return (has_few_rows(tile) ? kFewRows : kRows) * kSwizzleBytes;
  }

  template <int kRows>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int k_block, const Multicast<1>&) const {
    load_box(has_few_rows(tile) ? few_rows_map : map, to, barrier,
             WindowCoordinates{tile.k + k_block * kBlockK, tile.row, tile.end_row});
  }

 private:
  __device__ static bool has_few_rows(const Tile& tile) { return tile.end_row - tile.row <= kFewRows; }
};

// Operands B of GEMMs over rows: the weights of one expert.
struct MatrixOfExpert : LoadedByTma {
  int32_t first_expert = 0;  // of the map's first matrix

  __device__ int matrix_of(const Tile& tile) const { return tile.expert - first_expert; }
};

// kScale columns of the matrix per column of the tile.
template <Major kMajor_, int kScale = 1>
struct WeightOperand;

// Weights as stored, [E, D, N].
template <int kScale>
struct WeightOperand<Major::mn, kScale> : MatrixOfExpert {
  static constexpr Major kMajor = Major::mn;
  CUtensorMap map;  // matrices, boxes [64][64]

  __device__ void prefetch_maps() const { prefetch_map(map); }

  template <int kColumns, class AnyMulticast>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int k_block,
                       const AnyMulticast& multicast) const {
#pragma unroll 1  // the producer has few registers
    for (int panel = multicast.first; panel < kColumns / kPanel; panel += multicast.count) {
      load_box(map, to + panel * kPanelBytes, barrier,
               MatrixCoordinates{kScale * tile.column + panel * kPanel, tile.k + k_block * kBlockK, matrix_of(tile)},
               multicast);
    }
  }
};

// Transposed weights, [E, N, D].
template <int kScale>
struct WeightOperand<Major::k, kScale> : MatrixOfExpert {
  static constexpr Major kMajor = Major::k;
  CUtensorMap map;  // matrices, boxes [kColumns / kBlocks][64]

  __device__ void prefetch_maps() const { prefetch_map(map); }

  template <int kColumns, int kBlocks>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int k_block,
                       const Multicast<kBlocks>& multicast) const {
    constexpr int kBoxColumns = kColumns / kBlocks;
#pragma unroll 1  // the producer has few registers
    for (int box = multicast.first; box < kBlocks; box += multicast.count) {
      load_box(map, to + box * kBoxColumns * kSwizzleBytes, barrier,
               MatrixCoordinates{tile.k + k_block * kBlockK, kScale * tile.column + box * kBoxColumns, matrix_of(tile)},
               multicast);
    }
  }
};

// Gate and up weights: half of a tile's columns are gate columns, the other half the same columns of up.
template <Major kMajor_>
struct GatedWeightOperand;

// Weights as stored, [E, D, 2, F].
template <>
struct GatedWeightOperand<Major::mn> : MatrixOfExpert {
  static constexpr Major kMajor = Major::mn;
  CUtensorMap gate;  // matrices, boxes [64][64]
  CUtensorMap up;

  __device__ void prefetch_maps() const {
    prefetch_map(gate);
    prefetch_map(up);
  }

  template <int kColumns, class AnyMulticast>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int k_block,
                       const AnyMulticast& multicast) const {
    constexpr int kPanels = kColumns / 2 / kPanel;
#pragma unroll 1  // the producer has few registers
    for (int panel = multicast.first; panel < 2 * kPanels; panel += multicast.count) {
      const int half_panel = panel % kPanels;
      load_box(panel < kPanels ? gate : up, to + panel * kPanelBytes, barrier,
               MatrixCoordinates{tile.column + half_panel * kPanel, tile.k + k_block * kBlockK, matrix_of(tile)},
               multicast);
    }
  }
};

// Transposed weights, [E, 2, F, D].
template <>
struct GatedWeightOperand<Major::k> : MatrixOfExpert {
  static constexpr Major kMajor = Major::k;
  CUtensorMap gate;  // matrices, boxes [kColumns / 2][64]
  CUtensorMap up;

  __device__ void prefetch_maps() const {
    prefetch_map(gate);
    prefetch_map(up);
  }

  template <int kColumns, class AnyMulticast>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int k_block,
                       const AnyMulticast& multicast) const {
#pragma unroll 1  // the producer has few registers
    for (int part = multicast.first; part < 2; part += multicast.count) {
      load_box(part == 0 ? gate : up, to + part * (kColumns / 2) * kSwizzleBytes, barrier,
               MatrixCoordinates{tile.k + k_block * kBlockK, tile.column, matrix_of(tile)}, multicast);
    }
  }
};

// Operand B of a GEMM over rows with an optional bias [E, 1, columns]. The bias is an extra k-block before those of the
// weights: one row of bias, then zeros, in the same column order. Operand A is all ones in this k-block.
template <class Weights>
struct BiasOf;
template <Major kMajor, int kScale>
struct BiasOf<WeightOperand<kMajor, kScale>> {
  using Operand = WeightOperand<Major::mn, kScale>;
};
template <Major kMajor>
struct BiasOf<GatedWeightOperand<kMajor>> {
  using Operand = GatedWeightOperand<Major::mn>;
};

template <class Weights>
struct BiasedOperand : Weights {
  static constexpr bool kMayHaveBias = true;
  typename BiasOf<Weights>::Operand bias;  // boxes [kWgmmaK][64]
  int32_t bias_blocks;                     // per tile: 1, or 0 without a bias

  __device__ void prefetch_maps() const {
    Weights::prefetch_maps();
    if (bias_blocks > 0) bias.prefetch_maps();
  }
};

// Operand B of a GEMM over rows: a factor of a low-rank adapter, stored like Weights, for each expert or shared.
template <class Weights>
struct FactorOperand : Weights {
  int32_t expert_stride;  // 0: one matrix for all experts; else 1

  template <int kColumns, class AnyMulticast>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int k_block,
                       const AnyMulticast& multicast) const {
    Tile from = tile;
    from.expert *= expert_stride;
    Weights::template load<kColumns>(to, barrier, from, k_block, multicast);
  }
};

// Operand B of a GEMM over rows with an optional low-rank term u B[e]. The term is k-blocks after those of the weights:
// operand A is the rows u [R, rank]. Both are zero past the rank.
template <class OperandB, class Weights>
struct LowRankOperand : OperandB {
  static constexpr bool kMayHaveLowRank = true;
  RowOperand u;
  FactorOperand<Weights> b;  // [E or 1, rank, columns]
  int32_t low_rank_steps;    // MMAs along the rank, of kWgmmaK each; 0: no term

  __device__ int low_rank_blocks() const { return (low_rank_steps + kBlockK / kWgmmaK - 1) / (kBlockK / kWgmmaK); }

  __device__ void prefetch_maps() const {
    OperandB::prefetch_maps();
    if (low_rank_steps == 0) return;
    u.prefetch_maps();
    b.prefetch_maps();
  }
};

// Number of k-blocks of a tile, including those of its bias and its low-rank term.
template <class OperandB>
__device__ __forceinline__ int blocks_of(const OperandB& b, const Tile& tile) {
  int blocks = tile.k_blocks;
  if (blocks == 0) return 0;
  if constexpr (OperandB::kMayHaveBias) blocks += b.bias_blocks;
  if constexpr (OperandB::kMayHaveLowRank) blocks += b.low_rank_blocks();
  return blocks;
}

// Transposed weights, [E, N, D], with shuffled columns within every 32 (make_shuffled_matrices_map).
struct ShuffledWeightOperand : MatrixOfExpert {
  static constexpr Major kMajor = Major::k;
  CUtensorMap map;  // boxes [32][64]

  __device__ void prefetch_maps() const { prefetch_map(map); }

  template <int kColumns, class AnyMulticast>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int k_block,
                       const AnyMulticast& multicast) const {
#pragma unroll 1  // the producer has few registers
    for (int column = multicast.first * 32; column < kColumns; column += multicast.count * 32) {
      load_shuffled_box(map, to + column * kSwizzleBytes, barrier,
                        MatrixCoordinates{tile.k + k_block * kBlockK, tile.column + column, matrix_of(tile)},
                        multicast);
    }
  }
};

// Operand A of a GEMM over gathered rows.
struct GatheredRowOperand : LoadedByThreads {
  static constexpr Major kMajor = Major::k;
  template <int kRows, bool = false>
  using Gather = RowGather<kRows>;
};

// A GatheredRowOperand with ClampedRowGather. The epilogue must ignore the accumulators of rows out of range.
struct ClampedRowOperand : GatheredRowOperand {
  template <int kRows, bool kAlsoDecodes = false>
  using Gather = ClampedRowGather<kRows, kAlsoDecodes>;
};

// Operand A or B of a weight gradient: the rows of a matrix are k, its columns are rows or columns of the result.
template <Side kSide>
struct RowsAsK : LoadedByTma {
  static constexpr Major kMajor = Major::mn;
  CUtensorMap map;  // row window, boxes [64][64]

  __device__ void prefetch_maps() const { prefetch_map(map); }

  template <int kCount>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int k_block, const Multicast<1>&) const {
#pragma unroll 1  // the producer has few registers
    for (int panel = 0; panel < kCount / kPanel; ++panel) {
      load_box(map, to + panel * kPanelBytes, barrier,
               WindowCoordinates{first_of<kSide>(tile) + panel * kPanel, tile.k + k_block * kBlockK, tile.end_k});
    }
  }
};

// Like RowsAsK, with gathered rows.
template <Side kSide>
struct GatheredRowsAsK : LoadedByThreads {
  static constexpr Major kMajor = Major::mn;
  template <int kCount, bool = false>
  using Gather = KGather<kSide, kCount>;
};

}  // namespace anabranch::cuda::hopper
