// Chooses the shape of result tiles of products over rows from what the host knows: a model of the cycles they take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "experts/portable/tile_shape.h"

namespace anabranch::cuda::portable {

// Cycles of a multiprocessor for a term of every sum of R rows in E groups.
template <class Shape>
double cycles_of(int64_t R, int64_t E, int64_t columns, int multiprocessors, int element_bytes, bool splits) {
  // Of A100, by what NVIDIA published: multiply-adds of 16-bit elements, and of TF32, three products each if split.
  const double multiply_adds = element_bytes == 2 ? 1024 : splits ? 512.0 / 3 : 512;
  constexpr double kCacheBytes = 48;     // that arrive from the L2 cache, a cycle
  constexpr double kSplitElements = 16;  // a cycle, every element by each warp that reads it
  const double multiply = Shape::kRows * kTileColumns / multiply_adds;
  const double read = Shape::kRows * Shape::kWarpColumns + kTileColumns * Shape::kWarpRows;
  const double split = splits ? read / kSplitElements : 0;
  const double load = (Shape::kRows + kTileColumns) * element_bytes / kCacheBytes;
  // Half a tile of rows is empty at the end of a group, in the mean.
  const double row_tiles = static_cast<double>(R) / Shape::kRows + static_cast<double>(std::min(E, R)) / 2;
  const double tiles = row_tiles * static_cast<double>((columns + kTileColumns - 1) / kTileColumns);
  // Where there are few, a multiprocessor has one of them, or none.
  return std::max(tiles / multiprocessors, 1.0) * std::max(multiply + split, load);
}

// columns: of the product.
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
