// Tiles of results: the unit of work of a block.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// The k dimension is the one that a product sums over; a k-block is what is brought to shared memory of it at a time.
constexpr int kBlockK = 64;

// rows x columns of the result of one expert's product: the sum over [k, end_k), zero where that is empty.
struct alignas(16) Tile {
  int32_t expert;   // kNoExpert: rows past all groups; kNoTile: no more tiles
  int32_t row;      // first row
  int32_t end_row;  // rows from here on belong to others
  int32_t column;   // first column
  int32_t k;
  int32_t end_k;
  int32_t k_blocks;
  int32_t first_k_block;  // of this block: the number of k-blocks of the tiles before
  int32_t partial;        // the partial result that the sum is; kWhole: the result itself
  int32_t multicasts_b;   // whether the blocks of the cluster have the same columns of the same expert
};
constexpr int32_t kNoExpert = -1;
constexpr int32_t kNoTile = -2;
constexpr int32_t kWhole = -1;

// Operands give rows or columns of the result.
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

}  // namespace anabranch::cuda
