// Chooses the tile shape from static sizes, by a model of the cycles of a GEMM.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace anabranch::cuda::hopper {

// Tile shapes with kernels, as rows x columns. tile_shape.cuh defines their schedules. Only thin GEMMs and
// weight gradients with few columns have kernels for the last.
enum class TileChoice { k128x256, k128x192, k128x128, k128x64 };

struct TileModel {
  TileChoice choice;
  int rows;
  int columns;
  bool overlaps;  // ping-pong: storing a tile overlaps with the MMAs of the next
};
constexpr TileModel kTileModels[] = {
    {TileChoice::k128x256, 128, 256, false},
    {TileChoice::k128x192, 128, 192, true},
    {TileChoice::k128x128, 128, 128, true},
};

// Columns of a partial sum of <da', a>, with any of these tiles that an intermediate gradient may have.
constexpr int kDotColumns = 128;

// L2 bandwidth in bytes per cycle and SM. Sharing an operand between two CTAs (InPairs) raises it; K-major weights
// lower it again.
constexpr double kCacheBytesAlone = 48;
constexpr double kCacheBytesInPairs = 56;
constexpr double kCacheBytesTransposed = 50;

// Cycles to compute `tiles` tiles with a contraction of length k. rows: average number of valid rows per tile.
inline double cycles_of(const TileModel& tile, double rows, double tiles, double k, int multiprocessors,
                        double cache_bytes) {
  constexpr double kMultiplyAdds = 2048;  // 16-bit multiply-adds per cycle
  constexpr double kStoreBytes = 28;      // bytes of results per cycle through shared memory
  constexpr double kStart = 1500;         // latency of the first operands of a tile, if it is not hidden
  constexpr double kSwitch = 750;         // between two tiles, if that latency is hidden
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

// is_supported(tile): whether kernels exist for a shape.
template <class Cycles, class IsSupported>
TileModel choose_fastest(const Cycles& cycles, const IsSupported& is_supported) {
  return *std::ranges::min_element(kTileModels, [&](const auto& a, const auto& b) {
    if (is_supported(a) != is_supported(b)) return is_supported(a);
    return cycles(a) < cycles(b);
  });
}

template <class Tiles, class IsSupported>
TileModel choose_tile(const Tiles& tiles, double k, int multiprocessors, double cache_bytes,
                      const IsSupported& is_supported) {
  const auto cycles = [&](const TileModel& tile) {
    return cycles_of(tile, tile.rows, tiles(tile), k, multiprocessors, cache_bytes);
  };
  return choose_fastest(cycles, is_supported);
}

// Chooses the tile for N columns of R rows in E groups, with contractions of length D.
template <class IsSupported>
TileModel choose_among(int64_t R, int64_t E, int64_t N, int64_t D, int multiprocessors, double cache_bytes,
                       const IsSupported& is_supported) {
  const auto tiles = [&](const TileModel& tile) {
    // On average, half a row tile per group is empty.
    const double row_tiles = static_cast<double>(R) / tile.rows + static_cast<double>(std::min(E, R)) / 2;
    return row_tiles * static_cast<double>(ceil_div(N, tile.columns));
  };
  return choose_tile(tiles, static_cast<double>(D), multiprocessors, cache_bytes, is_supported);
}

// Chooses the tile for groups that fill less than half a tile on average. Each group with rows has one row tile; the
// number of such groups assumes that rows are assigned uniformly at random.
inline TileModel choose_for_few_rows(int64_t R, int64_t E, int64_t N, int64_t D, int multiprocessors) {
  const auto groups = static_cast<double>(E);
  const double used = groups * (1.0 - std::pow(1.0 - 1.0 / groups, static_cast<double>(R)));
  const auto cycles = [&](const TileModel& tile) {
    return cycles_of(tile, static_cast<double>(R) / used, used * static_cast<double>(ceil_div(N, tile.columns)),
                     static_cast<double>(D), multiprocessors, kCacheBytesInPairs);
  };
  return choose_fastest(cycles, [](const TileModel&) { return true; });
}

// Chooses the tile for any GEMM over rows. transposed: the weights are K-major.
inline TileModel choose_row_tile(int64_t R, int64_t E, int64_t N, int64_t D, bool transposed, int multiprocessors) {
  constexpr int64_t kFewRows = 64;
  if (0 < R && R < kFewRows * E) return choose_for_few_rows(R, E, N, D, multiprocessors);
  return choose_among(R, E, N, D, multiprocessors, transposed ? kCacheBytesTransposed : kCacheBytesInPairs,
                      [](const TileModel&) { return true; });
}

// Chooses the tile for GEMMs with few columns N.
inline TileChoice choose_thin_tile(int64_t N) { return N <= 64 ? TileChoice::k128x64 : TileChoice::k128x128; }

// Whether a shape leaves registers for gathering or for an epilogue that reads h. For gate and up, half of its columns
// must also be whole panels.
inline bool leaves_registers(const TileModel& tile) { return tile.choice != TileChoice::k128x192; }

// Chooses the tile for GEMMs whose epilogue reads or writes h. N: columns of W_in or W_out.
inline TileModel choose_fused_tile(int64_t R, int64_t E, int64_t N, int64_t D, int multiprocessors) {
  return choose_among(R, E, N, D, multiprocessors, kCacheBytesInPairs, leaves_registers);
}

// Chooses the tile for weight gradients [D, N] of E groups, summed over R rows in total.
inline TileModel choose_weight_tile(int64_t R, int64_t E, int64_t D, int64_t N, bool gathers, int multiprocessors) {
  const auto tiles = [&](const TileModel& tile) {
    return static_cast<double>(E * ceil_div(D, tile.rows)) * static_cast<double>(ceil_div(N, tile.columns));
  };
  return choose_tile(tiles, static_cast<double>(R) / static_cast<double>(E), multiprocessors, kCacheBytesAlone,
                     [&](const TileModel& tile) { return !gathers || leaves_registers(tile); });
}

}  // namespace anabranch::cuda::hopper
