// Where the factors of a tile come from: each brings the panels of one step (64 terms) to shared memory.
//
// load(): one thread starts copies that complete on `barrier`, which expects the bytes of all panels. kGathered:
// instead the four warps of the producer warpgroup copy, see Gather. prefetch(): before the first load.
#pragma once

#include "core/cuda/tma.cuh"
#include "experts/hopper/gather.cuh"
#include "experts/hopper/tile.cuh"

namespace anabranch::cuda {

// A of a product over rows: rows of a matrix [R, K], those of other experts zero.
struct Rows {
  static constexpr Major kMajor = Major::k;
  static constexpr bool kGathered = false;
  template <int>
  using Gather = NoGather;
  CUtensorMap map;  // row window, boxes [kRows][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kRows>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step) const {
    load_box(map, to, barrier, WindowCoordinates{tile.term + step * kStepTerms, tile.row, tile.end_row});
  }
};

// B of a product over rows: one expert's weights.
template <Major kMajor_>
struct Weights;

// As stored, [E, K, N].
template <>
struct Weights<Major::mn> {
  static constexpr Major kMajor = Major::mn;
  static constexpr bool kGathered = false;
  template <int>
  using Gather = NoGather;
  CUtensorMap map;  // matrices, boxes [64][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kColumns>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step) const {
#pragma unroll 1  // the producer has few registers
    for (int panel = 0; panel < kColumns / kPanel; ++panel) {
      load_box(map, to + panel * kPanelBytes, barrier,
               MatrixCoordinates{tile.column + panel * kPanel, tile.term + step * kStepTerms, tile.expert});
    }
  }
};

// Stored transposed, [E, N, K].
template <>
struct Weights<Major::k> {
  static constexpr Major kMajor = Major::k;
  static constexpr bool kGathered = false;
  template <int>
  using Gather = NoGather;
  CUtensorMap map;  // matrices, boxes [kColumns][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kColumns>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step) const {
    load_box(map, to, barrier, MatrixCoordinates{tile.term + step * kStepTerms, tile.column, tile.expert});
  }
};

// The weights of gate and up as stored, [E, K, 2, N]: half of the columns are the gate's, the others belong to the same
// columns of up.
struct GatedWeights {
  static constexpr Major kMajor = Major::mn;
  static constexpr bool kGathered = false;
  template <int>
  using Gather = NoGather;
  CUtensorMap gate;  // matrices, boxes [64][64]
  CUtensorMap up;

  __device__ void prefetch() const {
    prefetch_map(gate);
    prefetch_map(up);
  }

  template <int kColumns>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step) const {
    constexpr int kPanels = kColumns / 2 / kPanel;
#pragma unroll 1  // the producer has few registers
    for (int panel = 0; panel < kPanels; ++panel) {
      const MatrixCoordinates at{tile.column + panel * kPanel, tile.term + step * kStepTerms, tile.expert};
      load_box(gate, to + panel * kPanelBytes, barrier, at);
      load_box(up, to + (kPanels + panel) * kPanelBytes, barrier, at);
    }
  }
};

// Stored transposed, [E, N, K], the columns of every 32 shuffled (make_shuffled_matrices_map).
struct ShuffledWeights {
  static constexpr Major kMajor = Major::k;
  static constexpr bool kGathered = false;
  template <int>
  using Gather = NoGather;
  CUtensorMap map;  // boxes [32][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kColumns>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step) const {
#pragma unroll 1  // the producer has few registers
    for (int column = 0; column < kColumns; column += 32) {
      load_shuffled_box(map, to + column * kSwizzleBytes, barrier,
                        MatrixCoordinates{tile.term + step * kStepTerms, tile.column + column, tile.expert});
    }
  }
};

// A of a product over rows that stand elsewhere.
struct GatheredRows : RowsElsewhere {
  static constexpr Major kMajor = Major::k;
  static constexpr bool kGathered = true;
  template <int kRows>
  using Gather = RowGather<kRows>;

  __device__ void prefetch() const {}

  template <int kRows>
  __device__ void load(uint32_t, Barrier&, const Tile&, int) const {}
};

// A or B of a product over terms: rows of a matrix are terms of the sums, its columns are rows or columns of the
// result.
template <Side kSide>
struct Terms {
  static constexpr Major kMajor = Major::mn;
  static constexpr bool kGathered = false;
  template <int>
  using Gather = NoGather;
  CUtensorMap map;  // row window, boxes [64][64]

  __device__ void prefetch() const { prefetch_map(map); }

  template <int kCount>
  __device__ void load(uint32_t to, Barrier& barrier, const Tile& tile, int step) const {
#pragma unroll 1  // the producer has few registers
    for (int panel = 0; panel < kCount / kPanel; ++panel) {
      load_box(map, to + panel * kPanelBytes, barrier,
               WindowCoordinates{first_of<kSide>(tile) + panel * kPanel, tile.term + step * kStepTerms, tile.end_term});
    }
  }
};

// The same of rows that stand elsewhere.
template <Side kSide>
struct GatheredTerms : RowsElsewhere {
  static constexpr Major kMajor = Major::mn;
  static constexpr bool kGathered = true;
  template <int kCount>
  using Gather = TermGather<kSide, kCount>;

  __device__ void prefetch() const {}

  template <int kCount>
  __device__ void load(uint32_t, Barrier&, const Tile&, int) const {}
};

}  // namespace anabranch::cuda
