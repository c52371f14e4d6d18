// Tiles of results: the unit of work of a block, and how a block is organised for them.
#pragma once

#include <cstdint>

#include "core/cuda/wgmma.cuh"

namespace anabranch::cuda {

// Terms of the sums that one slot of the ring holds.
constexpr int kStepTerms = kPanel;

// rows x columns of the result of one expert's product: the sum of terms [term, end_term), zero if there are none.
struct alignas(16) Tile {
  int32_t expert;   // kNoExpert: rows past all groups; kNoTile: no more tiles
  int32_t row;      // first row
  int32_t end_row;  // rows from here on belong to others
  int32_t column;   // first column
  int32_t term;
  int32_t end_term;
  int32_t steps;       // of kStepTerms terms
  int32_t first_step;  // of this block: the number of steps of the tiles before
  int32_t partial;     // the partial result that the sum is; kWhole: the result itself
  int32_t in_common;   // whether the blocks of the cluster have the same columns of the same expert
};
constexpr int32_t kNoExpert = -1;
constexpr int32_t kNoTile = -2;
constexpr int32_t kWhole = -1;

// Factors give rows or columns of the result.
enum class Side { rows, columns };
template <Side kSide>
__device__ int32_t first_of(const Tile& tile) {
  return kSide == Side::rows ? tile.row : tile.column;
}

// Where the index-th of row_tiles x column_tiles tiles stands, counted in tiles. In bands of up to kMostInBand tiles of
// rows, column after column: blocks that run at a time share few rows and few columns, which fit the L2 cache.
struct TilePlace {
  int32_t row;
  int32_t column;
};
constexpr int kBandTiles = 16;
template <int kMostInBand = kBandTiles>
__device__ __forceinline__ TilePlace place_of(int32_t index, int32_t row_tiles, int32_t column_tiles) {
  const int32_t bands = (row_tiles + kMostInBand - 1) / kMostInBand;
  const int32_t band_rows = (row_tiles + bands - 1) / bands;
  const int32_t band = index / (band_rows * column_tiles);
  const int32_t in_band = index - band * band_rows * column_tiles;
  const int32_t height = min(band_rows, row_tiles - band * band_rows);
  return {band * band_rows + in_band % height, in_band / height};
}

// A tile of kRows x kColumns is computed by a team of warpgroups, split by rows. One team of two: both work on the same
// tile, which may be large. Two teams of one: while a team stores its tile the other one multiplies, so that tiles of
// few steps don't leave the tensor cores idle. kBlocks: of a cluster, which work on tiles with a factor in common.
template <int kRows_, int kColumns_, int kStages_, int kTeams_, int kBlocks_ = 1>
struct TileShape {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kStages = kStages_;  // slots of the ring of operands
  static constexpr int kTeams = kTeams_;
  static constexpr int kBlocks = kBlocks_;

  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kTeamWarpgroups = kConsumers / kTeams;
  static constexpr int kTeamWarps = kTeamWarpgroups * 4;
  static constexpr int kWarpgroupRows = kRows / kTeamWarpgroups;
  static constexpr int kWarpgroupPanels = kWarpgroupRows / kPanel;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr int kBytesA = kRows / kPanel * kPanelBytes;
  static constexpr int kBytesB = kColumns / kPanel * kPanelBytes;

  static_assert(kTeams == 1 || kTeams == 2);
  static_assert(kRows % (kPanel * kTeamWarpgroups) == 0 && kColumns % kPanel == 0);
};

}  // namespace anabranch::cuda
