// Parts of the rows of GEMMs that begin before all tokens have arrived: the two parts have every row once, and the
// first one has no row of a token that arrives later.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "core/cuda/launch.h"
#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"
#include "experts/cuda/source_bounds.h"

namespace anabranch::testing {
namespace {

using namespace anabranch::cuda;

constexpr int kRows = 128;
constexpr int kColumns = 64;
constexpr int kColumnTiles = 3;
constexpr int kBlocks = 5;

// One warp per CTA.
__global__ void list_tiles(const PartOfRowTiles part, Tile* const tiles, int32_t* const count) {
  RowTileScheduler<kRows, kColumns, 1, PartOfRowTiles> scheduler(part);
  for (int n = 0;; ++n) {
    const Tile tile = scheduler.next(n);
    if (tile.expert == kNoTile) break;
    if (lane_index() == 0) tiles[atomicAdd(count, 1)] = tile;
  }
}

// Rows of E groups, of the tokens of some sources, in the order of their slots.
struct Rows {
  int64_t slots_per_source;
  std::vector<int32_t> sizes;
  std::vector<int32_t> slots;

  Rows(int E, int sources, int64_t slots_per_source_, int align, int64_t more, uint32_t seed)
      : slots_per_source(slots_per_source_) {
    std::mt19937 random(seed);
    std::vector<std::vector<int32_t>> groups(static_cast<size_t>(E));
    for (int32_t slot = 0; slot < sources * slots_per_source; ++slot) {
      // Some sources have few rows in some groups, and group 1 has none.
      const size_t group = random() % groups.size();
      if (group == 1 || (group == 2 && slot / slots_per_source != 1)) continue;
      groups[group].push_back(slot);
    }
    for (std::vector<int32_t>& group : groups) {
      while (group.size() % static_cast<size_t>(align) != 0) group.push_back(-1);
      sizes.push_back(static_cast<int32_t>(group.size()));
      slots.insert(slots.end(), group.begin(), group.end());
    }
    slots.insert(slots.end(), static_cast<size_t>(more), -1);
  }
  int64_t R() const { return static_cast<int64_t>(slots.size()); }
};

std::vector<Tile> tiles_of(const Rows& rows, const RowPart& part, bool skips_rest) {
  const auto E = static_cast<int64_t>(rows.sizes.size());
  std::vector<Tile> tiles(static_cast<size_t>(max_group_row_tiles(rows.R(), E, kRows) * kColumnTiles));
  int32_t count = 0;
  PartOfRowTiles list{};
  list.groups = groups_of(rows.sizes.data(), E, rows.R());
  list.k = 64;
  list.column_tiles = kColumnTiles;
  list.skips_rest = skips_rest;
  list.part = part;
  EXPECT_EQ(launch("list", list_tiles, {kBlocks, kWarp, 0, nullptr}, list, tiles.data(), &count).code, AB_OK);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  tiles.resize(static_cast<size_t>(count));
  return tiles;
}

void check(const Rows& rows, int64_t sources, int64_t first, int64_t end) {
  SCOPED_TRACE(::testing::Message() << "sources " << first << " to " << end << " of " << sources);
  const auto E = static_cast<int64_t>(rows.sizes.size());
  const auto is_first = [&](int32_t slot) {
    const int64_t source = slot / rows.slots_per_source;
    return slot < 0 || (source >= first && source < end) || (source - sources >= first && source - sources < end);
  };
  const bool is_interval = first >= 0;
  const Sources found{is_interval ? first : end, is_interval ? end : first + sources, rows.slots_per_source,
                      !is_interval};
  std::vector<int32_t> bounds(static_cast<size_t>(2 * E), -7);
  const RowMap map(rows.slots.data(), sources * rows.slots_per_source, 1);
  EXPECT_EQ(find_source_bounds(groups_of(rows.sizes.data(), E, rows.R()), map, found, bounds.data(), nullptr).code,
            AB_OK);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  std::map<std::pair<int32_t, int32_t>, int> seen;  // by row and column
  for (const bool is_second : {false, true}) {
    for (const Tile& tile : tiles_of(rows, {bounds.data(), is_interval != is_second}, !is_second)) {
      for (int32_t row = tile.row; row < std::min(tile.row + kRows, tile.end_row); ++row) {
        ++seen[{row, tile.column}];
        EXPECT_TRUE(is_second || is_first(rows.slots[static_cast<size_t>(row)])) << "row " << row;
      }
    }
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()), rows.R() * kColumnTiles);
  for (const auto& [place, times] : seen) EXPECT_EQ(times, 1) << "row " << place.first << " column " << place.second;
}

TEST(RowParts, HaveEveryRowOnceAndTheFirstOnlyFirstSources) {
  for (const int align : {1, 128}) {
    for (const int E : {3, 40}) {
      for (const int64_t sources : {2, 3, 4, 8}) {
        const Rows rows(E, static_cast<int>(sources), E == 3 ? 500 : 900, align, 30, static_cast<uint32_t>(sources));
        const int64_t firsts = sources < 4 ? 1 : sources / 2;
        for (int64_t rank = 0; rank < sources; ++rank) check(rows, sources, rank + 1 - firsts, rank + 1);
      }
    }
  }
}

}  // namespace
}  // namespace anabranch::testing
