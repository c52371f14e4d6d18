// Chooses the shape of result tiles of products over rows from what the host knows: a model of the cycles they take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "experts/portable/tile_shape.h"

namespace anabranch::cuda::portable {

// Cycles of a multiprocessor for a term of every sum of R rows in E groups and 128 columns, with tiles of so many rows.
inline double cycles_of(double rows, int64_t R, int64_t E, int element_bytes) {
  // Of A100, by what NVIDIA published: of 16-bit elements, and of TF32, three products each.
  const double multiply_adds = element_bytes == 2 ? 1024 : 512.0 / 3;
  // Bytes that arrive at a multiprocessor from the L2 cache, a cycle.
  constexpr double kCacheBytes = 48;
  const double multiply = rows * kTileColumns / multiply_adds;
  const double load = (rows + kTileColumns) * element_bytes / kCacheBytes;
  // Half a tile of rows is empty at the end of a group, in the mean.
  const double tiles = static_cast<double>(R) / rows + static_cast<double>(std::min(E, R)) / 2;
  return tiles * std::max(multiply, load);
}

inline TileChoice choose_tile(int64_t R, int64_t E, int element_bytes) {
  const int main_rows = element_bytes == 2 ? LargeTile::kRows : SplitTile::kRows;
  const bool small = cycles_of(SmallTile::kRows, R, E, element_bytes) < cycles_of(main_rows, R, E, element_bytes);
  return small ? TileChoice::small : TileChoice::main;
}

}  // namespace anabranch::cuda::portable
