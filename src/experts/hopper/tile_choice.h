// Chooses the shape of result tiles from what the host knows: a model of the cycles a product takes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace anabranch::cuda::hopper {

// Shapes that kernels are built for, as "rows x columns", and by which schedule (tile_shape.cuh).
enum class TileChoice { k128x256, k128x192, k128x128 };

struct TileModel {
  TileChoice choice;
  int rows;
  int columns;
  bool overlaps;  // ping-pong: a tile is stored while the next one is multiplied
};
constexpr TileModel kTileModels[] = {
    {TileChoice::k128x256, 128, 256, false},
    {TileChoice::k128x192, 128, 192, true},
    {TileChoice::k128x128, 128, 128, true},
};

// Bytes that arrive at a multiprocessor from the L2 cache, a cycle: where two blocks share an operand (InPairs), more,
// and less of that where weights are taken transposed.
constexpr double kCacheBytesAlone = 48;
constexpr double kCacheBytesInPairs = 56;
constexpr double kCacheBytesTransposed = 50;

// Cycles until so many tiles are computed, each element a sum over k. rows: that there are of a tile, in the mean.
inline double cycles_of(const TileModel& tile, double rows, double tiles, double k, int multiprocessors,
                        double cache_bytes) {
  constexpr double kMultiplyAdds = 2048;  // of 16-bit elements, a cycle
  constexpr double kStoreBytes = 28;      // of results through shared memory, a cycle
  constexpr double kStart = 1500;         // until the first operands of a tile are there, if nothing hides it
  constexpr double kSwitch = 750;         // from tile to tile, if something does
  const int half = tile.rows / 2;
  const double multiplied_rows = rows <= half ? half : tile.rows;
  const double multiply = multiplied_rows * tile.columns * k / kMultiplyAdds;
  const double load = 2.0 * (rows + tile.columns) * k / cache_bytes;
  const double store = 2 * rows * tile.columns / kStoreBytes;
  const double compute = std::max(multiply, load);
  const double waves = std::max(tiles / multiprocessors + 0.5, 1.0);
  return kStart + waves * (tile.overlaps ? std::max(compute, store) + kSwitch : compute + store);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `can`: whether kernels are built for a shape.
template <class Cycles, class Can>
TileModel choose_least(const Cycles& cycles, const Can& can) {
  return *std::ranges::min_element(kTileModels, [&](const auto& a, const auto& b) {
    if (can(a) != can(b)) return can(a);
    return cycles(a) < cycles(b);
  });
}

template <class Tiles, class Can>
TileModel choose_tile(const Tiles& tiles, double k, int multiprocessors, double cache_bytes, const Can& can) {
  const auto cycles = [&](const TileModel& tile) {
    return cycles_of(tile, tile.rows, tiles(tile), k, multiprocessors, cache_bytes);
  };
  return choose_least(cycles, can);
}

// For N columns of R rows of E groups, contractions of length D.
template <class Can>
TileModel choose_among(int64_t R, int64_t E, int64_t N, int64_t D, int multiprocessors, double cache_bytes,
                       const Can& can) {
  const auto tiles = [&](const TileModel& tile) {
    // Half a tile of rows is empty at the end of a group, in the mean.
    const double row_tiles = static_cast<double>(R) / tile.rows + static_cast<double>(std::min(E, R)) / 2;
    return row_tiles * static_cast<double>(ceil_div(N, tile.columns));
  };
  return choose_tile(tiles, static_cast<double>(D), multiprocessors, cache_bytes, can);
}

// Where a group's rows fill less than half a tile, in the mean: each group that has rows, were they dealt out by
// chance, has one row of tiles.
inline TileModel choose_for_few_rows(int64_t R, int64_t E, int64_t N, int64_t D, int multiprocessors) {
  const auto groups = static_cast<double>(E);
  const double used = groups * (1.0 - std::pow(1.0 - 1.0 / groups, static_cast<double>(R)));
  const auto cycles = [&](const TileModel& tile) {
    return cycles_of(tile, static_cast<double>(R) / used, used * static_cast<double>(ceil_div(N, tile.columns)),
                     static_cast<double>(D), multiprocessors, kCacheBytesInPairs);
  };
  return choose_least(cycles, [](const TileModel&) { return true; });
}

// transposed: whether the weights are taken so.
inline TileModel choose_row_tile(int64_t R, int64_t E, int64_t N, int64_t D, bool transposed, int multiprocessors) {
  constexpr int64_t kFewRows = 64;
  if (0 < R && R < kFewRows * E) return choose_for_few_rows(R, E, N, D, multiprocessors);
  return choose_among(R, E, N, D, multiprocessors, transposed ? kCacheBytesTransposed : kCacheBytesInPairs,
                      [](const TileModel&) { return true; });
}

// Shapes that leave registers for gathering, or for an epilogue that works on h; and halves of their columns are whole
// panels, for gate and up.
inline bool leaves_registers(const TileModel& tile) { return tile.choice != TileChoice::k128x192; }

// The same for products whose epilogue works on h, in columns of W_in or W_out.
inline TileModel choose_fused_tile(int64_t R, int64_t E, int64_t N, int64_t D, int multiprocessors) {
  return choose_among(R, E, N, D, multiprocessors, kCacheBytesInPairs, leaves_registers);
}

// For [D, N] of each of E groups, sums over its rows, R in all.
inline TileModel choose_weight_tile(int64_t R, int64_t E, int64_t D, int64_t N, bool gathers, int multiprocessors) {
  const auto tiles = [&](const TileModel& tile) {
    return static_cast<double>(E * ceil_div(D, tile.rows)) * static_cast<double>(ceil_div(N, tile.columns));
  };
  return choose_tile(tiles, static_cast<double>(R) / static_cast<double>(E), multiprocessors, kCacheBytesAlone,
                     [&](const TileModel& tile) { return !gathers || leaves_registers(tile); });
}

}  // namespace anabranch::cuda::hopper
