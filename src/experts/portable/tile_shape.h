// The shape of a result tile, and how the warps of a block share it.
#pragma once

#include <cstdint>
#include <type_traits>

namespace anabranch::cuda::portable {

// A k-block is so many bytes deep, whatever the elements are, and an instruction takes 32 of them.
constexpr int kDepthBytes = 64;
constexpr int kStepBytes = 32;
constexpr int kSteps = kDepthBytes / kStepBytes;
template <class Element>
constexpr int kDepth = kDepthBytes / static_cast<int>(sizeof(Element));

constexpr int kThreads = 128;
constexpr int kWarps = 4;
constexpr int kBlocks = 2;  // of a multiprocessor: while one stores its tile, the other one multiplies
constexpr int kTileColumns = 128;

// What an instruction computes: 16 rows of 8 columns.
constexpr int kFragmentRows = 16;
constexpr int kFragmentColumns = 8;

// kWarpRows_: of the warps' arrangement.
template <int kRows_, int kWarpRows_, int kStages_>
struct TileShape {
  static constexpr int kRows = kRows_;
  static constexpr int kStages = kStages_;  // k-blocks of operands in shared memory
  static constexpr int kWarpRows = kWarpRows_;
  static constexpr int kWarpColumns = kWarps / kWarpRows;
  static constexpr int kRowsOfWarp = kRows / kWarpRows;
  static constexpr int kColumnsOfWarp = kTileColumns / kWarpColumns;
  static constexpr int kFragmentsDown = kRowsOfWarp / kFragmentRows;
  static constexpr int kFragmentsAcross = kColumnsOfWarp / kFragmentColumns;
  static constexpr int kBytesA = kRows * kDepthBytes;
  static constexpr int kBytesB = kTileColumns * kDepthBytes;
  static_assert(kRowsOfWarp % kFragmentRows == 0 && kColumnsOfWarp % (2 * kFragmentColumns) == 0);
};

// A warp has 64 x 64, for which it reads half as much from shared memory as for four of 32 x 32. Three stages are what
// two blocks can have on the smallest multiprocessors (100 KiB: compute capabilities 8.6, 8.9 and 12.0).
using LargeTile = TileShape<128, 2, 3>;
// Of split operands: 32 x 64 a warp, as its registers allow.
using SplitTile = TileShape<64, 2, 4>;
// For groups of few rows, whose time is that of reading weights.
using SmallTile = TileShape<32, 1, 4>;

// For many rows, and for few.
enum class TileChoice { main, small };
template <class Element, TileChoice kTile>
using TileOf = std::conditional_t<kTile == TileChoice::small, SmallTile,
                                  std::conditional_t<sizeof(Element) == 2, LargeTile, SplitTile>>;

}  // namespace anabranch::cuda::portable
