// Tile shapes, and how the warps of a CTA share a tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "experts/precision.h"

namespace anabranch::cuda::portable {

// A k-block has the same depth in bytes for all element types. An MMA step covers 32 bytes of it.
constexpr int kDepthBytes = 64;
constexpr int kStepBytes = 32;
constexpr int kSteps = kDepthBytes / kStepBytes;
template <class Element>
constexpr int kDepth = kDepthBytes / static_cast<int>(sizeof(Element));

constexpr int kTileColumns = 128;

// Result of one MMA: 16 rows of 8 columns.
constexpr int kFragmentRows = 16;
constexpr int kFragmentColumns = 8;

// kWarpRows_ x kWarpColumns_: arrangement of the warps. kStages_: k-blocks in shared memory. kBlocks_: CTAs per SM if
// shared memory suffices; the latency and the epilogue of one CTA overlap with the work of the others.
template <int kRows_, int kWarpRows_, int kWarpColumns_, int kStages_, int kBlocks_>
struct TileShape {
  static constexpr int kRows = kRows_;
  static constexpr int kStages = kStages_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kWarpRows = kWarpRows_;
  static constexpr int kWarpColumns = kWarpColumns_;
  static constexpr int kThreads = 32 * kWarpRows * kWarpColumns;
  static constexpr int kRowsOfWarp = kRows / kWarpRows;
  static constexpr int kColumnsOfWarp = kTileColumns / kWarpColumns;
  static constexpr int kFragmentsDown = kRowsOfWarp / kFragmentRows;
  static constexpr int kFragmentsAcross = kColumnsOfWarp / kFragmentColumns;
  static constexpr int kBytesA = kRows * kDepthBytes;
  static constexpr int kBytesB = kTileColumns * kDepthBytes;
  static_assert(kRowsOfWarp % (2 * kFragmentRows) == 0 && kColumnsOfWarp % (4 * kFragmentColumns) == 0,
                "a warp loads fragments of A in pairs and of B in fours");
};

// A warp computes 64 x 64, which needs half the shared-memory reads of four warps of 32 x 32. Three stages are the most
// that two CTAs can have on the smallest SMs (100 KiB: compute capabilities 8.6, 8.9 and 12.0).
using LargeTile = TileShape<128, 2, 2, 3, 2>;
// The tile for split operands: 32 x 64 per warp, limited by registers. Two CTAs of 64 x 128 would copy half as much
// again.
using SplitTile = TileShape<128, 4, 2, 5, 1>;
// The tile for groups with few rows, where reading weights dominates.
using SmallTile = TileShape<32, 1, 4, 4, 3>;

// main: many rows per group. small: few rows per group.
enum class TileChoice { main, small };
constexpr bool splits(size_t element_bytes, Precision precision) {
  return element_bytes == 4 && precision == Precision::highest;
}
template <class Element, Precision kPrecision, TileChoice kTile>
using TileOf = std::conditional_t<kTile == TileChoice::small, SmallTile,
                                  std::conditional_t<splits(sizeof(Element), kPrecision), SplitTile, LargeTile>>;

}  // namespace anabranch::cuda::portable
