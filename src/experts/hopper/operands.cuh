// Where the factors of a tile come from: each brings the panels of one step (64 terms) to shared memory.
//
// load(): one thread starts copies that complete on `barrier`, which expects the bytes of all panels, its own and those
// that other blocks of the cluster bring (Share). kGathered: instead the four warps of the producer warpgroup copy, see
// Gather. prefetch(): before the first load.
#pragma once

#include "core/cuda/tma.cuh"
#include "experts/hopper/gather.cuh"
#include "experts/hopper/tile.cuh"

namespace anabranch::cuda {

struct CopiedByEngine {
  static constexpr bool kGathered = false;
  template <int>
  using Gather = NoGather;
};

struct CopiedByThreads : RowsElsewhere {
  static constexpr bool kGathered = true;

  __device__ void prefetch() const {}

  template <int, class Share>
  __device__ void load(uint32_t, Barrier&, const Tile&, int, const Share&) const {}
};

// A of a product over rows: rows of a matrix [R, K], those of other experts zero.
struct Rows : CopiedByEngine {
  static constexpr Major kMajor = Major::k;
  CUtensorMap map;  // row window, boxes [kRows][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kRows>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step, const Share<1>&) const {
    load_box(map, to, barrier, WindowCoordinates{tile.term + step * kStepTerms, tile.row, tile.end_row});
  }
};

// B of a product over rows: one expert's weights.
template <Major kMajor_>
struct Weights;

// As stored, [E, K, N].
template <>
struct Weights<Major::mn> : CopiedByEngine {
  static constexpr Major kMajor = Major::mn;
  CUtensorMap map;  // matrices, boxes [64][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kColumns, class Share>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step, const Share& share) const {
#pragma unroll 1  // the producer has few registers
    for (int panel = share.first; panel < kColumns / kPanel; panel += share.count) {
      load_box(map, to + panel * kPanelBytes, barrier,
               MatrixCoordinates{tile.column + panel * kPanel, tile.term + step * kStepTerms, tile.expert}, share);
    }
  }
};

// Stored transposed, [E, N, K].
template <>
struct Weights<Major::k> : CopiedByEngine {
  static constexpr Major kMajor = Major::k;
  CUtensorMap map;  // matrices, boxes [kColumns / kBlocks][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kColumns, int kBlocks>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step, const Share<kBlocks>& share) const {
    constexpr int kBoxColumns = kColumns / kBlocks;
#pragma unroll 1  // the producer has few registers
    for (int box = share.first; box < kBlocks; box += share.count) {
      load_box(map, to + box * kBoxColumns * kSwizzleBytes, barrier,
               MatrixCoordinates{tile.term + step * kStepTerms, tile.column + box * kBoxColumns, tile.expert}, share);
    }
  }
};

// The weights of gate and up as stored, [E, K, 2, N]: half of the columns are the gate's, the others belong to the same
// columns of up.
struct GatedWeights : CopiedByEngine {
  static constexpr Major kMajor = Major::mn;
  CUtensorMap gate;  // matrices, boxes [64][64]
  CUtensorMap up;

  __device__ void prefetch() const {
    prefetch_map(gate);
    prefetch_map(up);
  }

  template <int kColumns, class Share>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step, const Share& share) const {
    constexpr int kPanels = kColumns / 2 / kPanel;
#pragma unroll 1  // the producer has few registers
    for (int panel = share.first; panel < 2 * kPanels; panel += share.count) {
      const int half_panel = panel % kPanels;
      load_box(panel < kPanels ? gate : up, to + panel * kPanelBytes, barrier,
               MatrixCoordinates{tile.column + half_panel * kPanel, tile.term + step * kStepTerms, tile.expert}, share);
    }
  }
};

// Stored transposed, [E, N, K], the columns of every 32 shuffled (make_shuffled_matrices_map).
struct ShuffledWeights : CopiedByEngine {
  static constexpr Major kMajor = Major::k;
  CUtensorMap map;  // boxes [32][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kColumns, class Share>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step, const Share& share) const {
#pragma unroll 1  // the producer has few registers
    for (int column = share.first * 32; column < kColumns; column += share.count * 32) {
      load_shuffled_box(map, to + column * kSwizzleBytes, barrier,
                        MatrixCoordinates{tile.term + step * kStepTerms, tile.column + column, tile.expert}, share);
    }
  }
};

// A of a product over rows that stand elsewhere.
struct GatheredRows : CopiedByThreads {
  static constexpr Major kMajor = Major::k;
  template <int kRows>
  using Gather = RowGather<kRows>;
};

// A or B of a product over terms: rows of a matrix are terms of the sums, its columns are rows or columns of the
// result.
template <Side kSide>
struct Terms : CopiedByEngine {
  static constexpr Major kMajor = Major::mn;
  CUtensorMap map;  // row window, boxes [64][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kCount>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step, const Share<1>&) const {
#pragma unroll 1  // the producer has few registers
    for (int panel = 0; panel < kCount / kPanel; ++panel) {
      load_box(map, to + panel * kPanelBytes, barrier,
               WindowCoordinates{first_of<kSide>(tile) + panel * kPanel, tile.term + step * kStepTerms, tile.end_term});
    }
  }
};

// The same of rows that stand elsewhere.
template <Side kSide>
struct GatheredTerms : CopiedByThreads {
  static constexpr Major kMajor = Major::mn;
  template <int kCount>
  using Gather = TermGather<kSide, kCount>;
};

}  // namespace anabranch::cuda
