// Chooses the tile shape of GEMMs over rows from static sizes, by a model of cycles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "experts/portable/tile_shape.h"

namespace anabranch::cuda::portable {

// Cycles per SM for one step of k of all sums of R rows in E groups.
template <class Shape>
double cycles_of(int64_t R, int64_t E, int64_t columns, int multiprocessors, int element_bytes, bool splits) {
  // Published A100 rates: multiply-adds per cycle for 16-bit elements and TF32. Split operands take three MMAs.
  const double multiply_adds = element_bytes == 2 ? 1024 : splits ? 512.0 / 3 : 512;
  constexpr double kCacheBytes = 48;     // per cycle from the L2 cache
  constexpr double kSplitElements = 16;  // per cycle; counted once per warp that reads the element
  const double multiply = Shape::kRows * kTileColumns / multiply_adds;
  const double read = Shape::kRows * Shape::kWarpColumns + kTileColumns * Shape::kWarpRows;
  const double split = splits ? read / kSplitElements : 0;
  const double load = (Shape::kRows + kTileColumns) * element_bytes / kCacheBytes;
  // On average, half a row tile per group is empty.
  const double row_tiles = static_cast<double>(R) / Shape::kRows + static_cast<double>(std::min(E, R)) / 2;
  const int64_t column_tiles = (columns + kTileColumns - 1) / kTileColumns;
  const double tiles = row_tiles * static_cast<double>(column_tiles);
  // With few tiles, an SM gets one tile or none.
  return std::max(tiles / multiprocessors, 1.0) * std::max(multiply + split, load);
}

// columns: of the result.
inline TileChoice choose_tile(int64_t R, int64_t E, int64_t columns, int multiprocessors, int element_bytes,
                              Precision precision) {
  const bool split = splits(static_cast<size_t>(element_bytes), precision);
  const auto cycles = [&]<class Shape>(Shape) {
    return cycles_of<Shape>(R, E, columns, multiprocessors, element_bytes, split);
  };
  const double main = split ? cycles(SplitTile{}) : cycles(LargeTile{});
  return cycles(SmallTile{}) < main ? TileChoice::small : TileChoice::main;
}

}  // namespace anabranch::cuda::portable
