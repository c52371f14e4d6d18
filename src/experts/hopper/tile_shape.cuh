// Tile shapes, and how the warpgroups of a CTA share tiles.
#pragma once

#include "core/cuda/wgmma.cuh"
#include "experts/cuda/ops/tiles/tile.cuh"

namespace anabranch::cuda::hopper {

static_assert(kBlockK == kPanel, "a k-block is one panel deep");

// How the two consumer warpgroups share the tiles of a CTA. cooperative: both work on one tile, split by rows, which
// allows large tiles. ping_pong: they alternate between tiles; one stores its tile while the other multiplies, so that
// tiles with few k-blocks don't leave the tensor cores idle.
enum class Schedule { cooperative, ping_pong };

// kBlocks: CTAs per cluster, whose tiles may share operand B. kProducers, kConsumers: warpgroups.
template <int kRows_, int kColumns_, int kStages_, Schedule kSchedule, int kBlocks_ = 1, int kProducers_ = 1,
          int kConsumers_ = 2>
struct TileShape {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kStages = kStages_;  // k-blocks of operands in shared memory
  static constexpr int kTilesInFlight = kSchedule == Schedule::ping_pong ? 2 : 1;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kCtasPerSm = 1;
  static constexpr int kMmaColumns = kColumns;  // of one MMA
  static constexpr int kPackedBytes = 0;        // of packed operands in shared memory
  static constexpr int kSubtileBuffers = 2;     // of each consumer warp, see SubtileWriter

  static constexpr int kProducers = kProducers_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kTileWarpgroups = kConsumers / kTilesInFlight;  // per tile
  static constexpr int kTileWarps = kTileWarpgroups * 4;
  static constexpr int kWarpgroupRows = kRows / kTileWarpgroups;
  static constexpr int kWarpgroupPanels = kWarpgroupRows / kPanel;
  static constexpr int kThreads = (kProducers + kConsumers) * kWarpgroup;
  static constexpr int kBytesA = kRows / kPanel * kPanelBytes;
  static constexpr int kBytesB = kColumns / kPanel * kPanelBytes;

  static_assert(kRows % (kPanel * kTileWarpgroups) == 0 && kColumns % kPanel == 0,
                "every warpgroup must have whole panels of 64 rows and 64 columns");
};

// Shapes with kernels. The number of stages fills the shared memory that the epilogue leaves.
using Tile128x256 = TileShape<128, 256, 4, Schedule::cooperative>;
using Tile128x192 = TileShape<128, 192, 4, Schedule::ping_pong>;
using Tile128x128 = TileShape<128, 128, 6, Schedule::ping_pong>;
using Tile128x64 = TileShape<128, 64, 8, Schedule::ping_pong>;
struct PackedTile256x128 : TileShape<256, 128, 4, Schedule::cooperative, 2, 2> {
  static constexpr int kPackedBytes = 16 << 10;
  static constexpr int kSubtileBuffers = 1;
};
// For few rows, whose MMAs take less time than decoding: two CTAs per SM have twice as many decoding warps. Their
// threads start with 80 registers, too few for an MMA of more columns.
struct PackedTile64x128 : TileShape<64, 128, 3, Schedule::cooperative, 1, 2, 1> {
  static constexpr int kCtasPerSm = 2;
  static constexpr int kMmaColumns = 64;
  static constexpr int kPackedBytes = 24 << 10;
  static constexpr int kSubtileBuffers = 1;
};
struct PackedTile128x256 : TileShape<128, 256, 3, Schedule::cooperative> {
  static constexpr int kPackedBytes = 48 << 10;
};

// Tile shape for clusters of two CTAs.
template <class Shape>
using InPairs = TileShape<Shape::kRows, Shape::kColumns, Shape::kStages,
                          Shape::kTilesInFlight == 2 ? Schedule::ping_pong : Schedule::cooperative, 2>;

}  // namespace anabranch::cuda::hopper
