// Result tiles: the unit of work of a CTA.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// Depth of a k-block: how much of the contracted dimension k is loaded to shared memory at a time.
constexpr int kBlockK = 64;

// A tile of the result of one expert's GEMM: the sum over [k, end_k), zero if that range is empty.
struct alignas(16) Tile {
  int32_t expert;   // kNoExpert: rows after all groups; kNoTile: no more tiles
  int32_t row;      // first row
  int32_t end_row;  // end of the expert's rows
  int32_t column;   // first column
  int32_t k;
  int32_t end_k;
  int32_t k_blocks;
  int32_t first_k_block;  // number of k-blocks in this CTA's earlier tiles
  int32_t partial;        // index of the partial sum; kWhole: the tile is a final result
  int32_t multicasts_b;   // whether the CTAs of the cluster have the same columns of the same expert
};
constexpr int32_t kNoExpert = -1;
constexpr int32_t kNoTile = -2;
constexpr int32_t kWhole = -1;

// The dimension of the result that an operand spans.
enum class Side { rows, columns };
template <Side kSide>
__device__ int32_t first_of(const Tile& tile) {
  return kSide == Side::rows ? tile.row : tile.column;
}

// Position of the index-th of row_tiles x column_tiles tiles, in tiles. Tiles are ordered in bands of at most
// kMaxBandTiles tile rows, and by column within a band: concurrent CTAs share few rows and few columns, which fit in
// L2.
struct TilePlace {
  int32_t row;
  int32_t column;
};
constexpr int kBandTiles = 16;
template <int kMaxBandTiles = kBandTiles>
__device__ __forceinline__ TilePlace place_of(int32_t index, int32_t row_tiles, int32_t column_tiles) {
  const int32_t bands = (row_tiles + kMaxBandTiles - 1) / kMaxBandTiles;
  const int32_t band_rows = (row_tiles + bands - 1) / bands;
  const int32_t band = index / (band_rows * column_tiles);
  const int32_t in_band = index - band * band_rows * column_tiles;
  const int32_t height = min(band_rows, row_tiles - band * band_rows);
  return {band * band_rows + in_band % height, in_band / height};
}

}  // namespace anabranch::cuda
