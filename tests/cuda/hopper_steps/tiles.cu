// The tiles that the scheduler assigns to CTAs, against the expected set.
#include <algorithm>
#include <map>
#include <tuple>

#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"
#include "steps.h"

namespace anabranch::steps {
namespace {

using namespace anabranch::cuda;

constexpr int kRows = 128;
constexpr int kColumns = 192;

// Launch with one warp per CTA and kBlocks CTAs per cluster. tiles[i * kBlocks + b] is the i-th tile of CTA b.
template <int kBlocks>
__global__ void list_tiles(RowTiles row_tiles, Tile* tiles, int max_count, int* count) {
  RowTileScheduler<kRows, kColumns, kBlocks> scheduler(row_tiles);
  const auto block = static_cast<int>(blockIdx.x) % kBlocks;
  for (int n = 0;; ++n) {
    const Tile tile = scheduler.next(n);
    if (tile.expert == kNoTile) break;
    if (lane_index() != 0) continue;
    const int index = static_cast<int>(blockIdx.x) + n * static_cast<int>(gridDim.x);
    if (index / kBlocks * kBlocks + block != index) __trap();
    if (index < max_count) tiles[index] = tile;
    atomicAdd(count, 1);
  }
}

template <int kBlocks>
int check_tiles(const char* name, const std::vector<int32_t>& sizes, int R, int N, int k, int clusters) {
  const int E = static_cast<int>(sizes.size());
  const int column_tiles = (N + kColumns - 1) / kColumns;
  const auto max_count = static_cast<int>(max_group_row_tiles(R, E, kRows) * column_tiles * kBlocks);
  const DeviceArray<int32_t> device_sizes(sizes);
  const DeviceArray<Tile> tiles(max_count);
  const DeviceArray<int> count(std::vector<int>{0});
  const auto blocks = static_cast<unsigned>(clusters * kBlocks);
  list_tiles<kBlocks>
      <<<blocks, kWarp>>>({{device_sizes.data(), E, R}, k, column_tiles}, tiles.data(), max_count, count.data());
  STEP_CUDA(cudaGetLastError());
  int failures = 0;
  const std::vector<Tile> got = tiles.fetch(&failures);
  const int listed = count.fetch(&failures)[0];

  // Maps (row, column) to (expert, end of the group).
  std::map<std::pair<int, int>, std::pair<int, int>> want;
  int64_t begin = 0;
  for (int e = 0; e <= E; ++e) {
    const int64_t end = e == E ? R : std::min<int64_t>(R, begin + std::max(sizes[static_cast<size_t>(e)], 0));
    for (int64_t row = begin; row < end; row += kRows) {
      for (int column = 0; column < N; column += kColumns) {
        want[{static_cast<int>(row), column}] = {e == E ? kNoExpert : e, static_cast<int>(end)};
      }
    }
    begin = end;
  }
  Comparison comparison(name);
  comparison.check(listed <= max_count && listed % kBlocks == 0, -1, -1, listed, max_count);
  for (int i = 0; i < std::min(listed, max_count); ++i) {
    const Tile& tile = got[static_cast<size_t>(i)];
    const Tile& first = got[static_cast<size_t>(i / kBlocks * kBlocks)];
    comparison.same(i, 4, tile.multicasts_b, first.multicasts_b);
    comparison.same(i, 5, tile.k_blocks, first.k_blocks);
    if (tile.multicasts_b != 0) {
      comparison.same(i, 6, tile.column, first.column);
      comparison.same(i, 7, tile.expert, first.expert);
    }
    if (tile.end_row == tile.row) {  // the last tile has no neighbour
      comparison.check(kBlocks == 2 && i % 2 == 1 && tile.multicasts_b == 0 && tile.column >= N, i, 8, tile.column, N);
      continue;
    }
    const auto place = want.find({tile.row, tile.column});
    const bool there = place != want.end();
    comparison.check(there, i, 0, tile.row, -1);
    if (!there) continue;
    comparison.same(i, 1, tile.expert, place->second.first);
    comparison.same(i, 2, tile.end_row, place->second.second);
    comparison.same(i, 3, tile.k_blocks, tile.expert == kNoExpert ? 0 : (k + 63) / 64);
    want.erase(place);
  }
  comparison.same(-1, -2, static_cast<int64_t>(want.size()), 0);
  return failures + comparison.report();
}

template <int kBlocks>
int check_groups() {
  int failures = 0;
  failures += check_tiles<kBlocks>("one group", {1000}, 1000, 500, 100, 7);
  failures += check_tiles<kBlocks>("empty and odd groups", {0, 1, 128, 0, 0, 129, 127, 5000, 0}, 5500, 700, 64, 132);
  failures += check_tiles<kBlocks>("no group", {}, 300, 192, 64, 3);
  failures += check_tiles<kBlocks>("no rows in groups", {0, 0, 0}, 300, 193, 64, 3);
  failures +=
      check_tiles<kBlocks>("sizes out of range", {-5, 200, INT32_MIN, INT32_MAX, INT32_MAX, 7}, 1000, 300, 64, 5);
  std::mt19937 random(7);
  for (const int E : {31, 32, 33, 64, 129, 1000}) {
    std::vector<int32_t> sizes(static_cast<size_t>(E));
    int R = 100;
    for (int32_t& size : sizes) {
      size = random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 700);
      R += size;
    }
    for (const int clusters : {1, 66}) {
      char name[64];
      std::snprintf(name, sizeof name, "%d groups, %d clusters of %d", E, clusters, kBlocks);
      failures += check_tiles<kBlocks>(name, sizes, R, 400, 256, clusters);
    }
  }
  return failures;
}

}  // namespace

int tiles_of_groups() { return check_groups<1>() + check_groups<2>(); }

}  // namespace anabranch::steps
