// Where the operands of a tile come from: each brings the panels of one k-block to shared memory.
//
// load(): one thread starts loads that complete on `barrier`, which expects the bytes of all panels, its own and those
// that other blocks of the cluster bring (Multicast). kGathered: instead the four warps of the producer warpgroup copy,
// see Gather. prefetch_maps(): before the first load.
#pragma once

#include "core/cuda/tma.cuh"
#include "experts/hopper/gather.cuh"
#include "experts/hopper/tile_shape.cuh"

namespace anabranch::cuda::hopper {

struct LoadedByTma {
  static constexpr bool kGathered = false;
  static constexpr bool kTakesBias = false;
  static constexpr bool kScaled = false;
  template <int>
  using Gather = NoGather;

  // That load() brings of a tile's rows or columns, kSides of them.
  template <int kSides>
  __device__ static constexpr uint32_t bytes(const Tile&) {
    return kSides * kSwizzleBytes;
  }
};

struct LoadedByThreads : GatherSource {
  static constexpr bool kGathered = true;
  static constexpr bool kTakesBias = false;
  static constexpr bool kScaled = false;

  __device__ void prefetch_maps() const {}

  template <int>
  __device__ static constexpr uint32_t bytes(const Tile&) {
    return 0;
  }
  template <int, class AnyMulticast>
  __device__ void load(uint32_t, Barrier&, const Tile&, int, const AnyMulticast&) const {}
};

// A of a product over rows: rows of a matrix [R, D], those of other experts zero. Where a tile has few rows, its other
// rows are what stood in shared memory before: zeros cost the copy engine as much time as rows.
struct RowOperand : LoadedByTma {
  static constexpr Major kMajor = Major::k;
  static constexpr int kFewRows = 32;
  CUtensorMap map;  // row window, boxes [kRows][64]
  CUtensorMap few;  // the same, boxes [kFewRows][64]

  __device__ void prefetch_maps() const {
    prefetch_map(map);
    prefetch_map(few);
  }

  template <int kRows>
  __device__ static uint32_t bytes(const Tile& tile) {
    return (has_few(tile) ? kFewRows : kRows) * kSwizzleBytes;
  }

  template <int kRows>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int k_block, const Multicast<1>&) const {
    load_box(has_few(tile) ? few : map, to, barrier,
             WindowCoordinates{tile.k + k_block * kBlockK, tile.row, tile.end_row});
  }

 private:
  __device__ static bool has_few(const Tile& tile) { return tile.end_row - tile.row <= kFewRows; }
};

// B of a product over rows: one expert's weights, kScale of whose columns there are for each of the tile's.
template <Major kMajor_, int kScale = 1>
struct WeightOperand;

// As stored, [E, D, N].
template <int kScale>
struct WeightOperand<Major::mn, kScale> : LoadedByTma {
  static constexpr Major kMajor = Major::mn;
  CUtensorMap map;  // matrices, boxes [64][64]

  __device__ void prefetch_maps() const { prefetch_map(map); }

  template <int kColumns, class AnyMulticast>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int k_block,
                       const AnyMulticast& multicast) const {
#pragma unroll 1  // the producer has few registers
    for (int panel = multicast.first; panel < kColumns / kPanel; panel += multicast.count) {
      load_box(map, to + panel * kPanelBytes, barrier,
               MatrixCoordinates{kScale * tile.column + panel * kPanel, tile.k + k_block * kBlockK, tile.expert},
               multicast);
    }
  }
};

// Stored transposed, [E, N, D].
template <int kScale>
struct WeightOperand<Major::k, kScale> : LoadedByTma {
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
               MatrixCoordinates{tile.k + k_block * kBlockK, kScale * tile.column + box * kBoxColumns, tile.expert},
               multicast);
    }
  }
};

// The weights of gate and up: half of the columns are the gate's, the others belong to the same columns of up.
template <Major kMajor_>
struct GatedWeightOperand;

// As stored, [E, D, 2, F].
template <>
struct GatedWeightOperand<Major::mn> : LoadedByTma {
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
               MatrixCoordinates{tile.column + half_panel * kPanel, tile.k + k_block * kBlockK, tile.expert},
               multicast);
    }
  }
};

// Stored transposed, [E, 2, F, D].
template <>
struct GatedWeightOperand<Major::k> : LoadedByTma {
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
               MatrixCoordinates{tile.k + k_block * kBlockK, tile.column, tile.expert}, multicast);
    }
  }
};

// B of a product over rows that may add a bias: the expert's, [E, 1, columns], is a k-block before those of its
// weights, of one row and of zeros, in the same order of columns. A has ones there.
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
  static constexpr bool kTakesBias = true;
  typename BiasOf<Weights>::Operand bias;  // boxes [kWgmmaK][64]
  int32_t bias_blocks;                     // of a tile: 1, or 0 without a bias

  __device__ void prefetch_maps() const {
    Weights::prefetch_maps();
    if (bias_blocks > 0) bias.prefetch_maps();
  }
};

// k-blocks of a tile, with its bias.
template <class OperandB>
__device__ __forceinline__ int blocks_of(const OperandB& b, const Tile& tile) {
  if constexpr (OperandB::kTakesBias) {
    if (tile.k_blocks > 0) return tile.k_blocks + b.bias_blocks;
  }
  return tile.k_blocks;
}

// Stored transposed, [E, N, D], the columns of every 32 shuffled (make_shuffled_matrices_map).
struct ShuffledWeightOperand : LoadedByTma {
  static constexpr Major kMajor = Major::k;
  CUtensorMap map;  // boxes [32][64]

  __device__ void prefetch_maps() const { prefetch_map(map); }

  template <int kColumns, class AnyMulticast>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int k_block,
                       const AnyMulticast& multicast) const {
#pragma unroll 1  // the producer has few registers
    for (int column = multicast.first * 32; column < kColumns; column += multicast.count * 32) {
      load_shuffled_box(map, to + column * kSwizzleBytes, barrier,
                        MatrixCoordinates{tile.k + k_block * kBlockK, tile.column + column, tile.expert}, multicast);
    }
  }
};

// A of a product over rows that stand elsewhere.
struct GatheredRowOperand : LoadedByThreads {
  static constexpr Major kMajor = Major::k;
  template <int kRows>
  using Gather = RowGather<kRows>;
};

// A or B of a gradient of weights: the rows of a matrix are the k dimension, its columns are rows or columns of the
// result.
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

// The same of rows that stand elsewhere.
template <Side kSide>
struct GatheredRowsAsK : LoadedByThreads {
  static constexpr Major kMajor = Major::mn;
  template <int kCount>
  using Gather = KGather<kSide, kCount>;
};

}  // namespace anabranch::cuda::hopper
