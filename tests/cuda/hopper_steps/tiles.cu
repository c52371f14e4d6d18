// The tiles that blocks find against those that there should be.
#include <algorithm>
#include <map>
#include <tuple>

#include "experts/hopper/row_tiles.cuh"
#include "steps.h"

namespace anabranch::steps {
namespace {

using namespace anabranch::cuda;

constexpr int kRows = 128;
constexpr int kColumns = 192;

// One warp a block; tiles[i]: the i-th tile.
__global__ void list_tiles(RowGroups groups, Tile* tiles, int most, int* count) {
  RowTiles<kRows, kColumns> finder(groups);
  for (int index = static_cast<int>(blockIdx.x);; index += static_cast<int>(gridDim.x)) {
    const Tile tile = finder.at(index);
    if (tile.expert == kNoTile) break;
    if (lane_index() != 0) continue;
    if (index < most) tiles[index] = tile;
    atomicAdd(count, 1);
  }
}

int check_tiles(const char* name, const std::vector<int32_t>& sizes, int R, int N, int K, int blocks) {
  const int E = static_cast<int>(sizes.size());
  const int column_tiles = (N + kColumns - 1) / kColumns;
  const auto most = static_cast<int>(most_row_tiles(R, E, kRows) * column_tiles);
  const DeviceArray<int32_t> device_sizes(sizes);
  const DeviceArray<Tile> tiles(most);
  const DeviceArray<int> count(std::vector<int>{0});
  list_tiles<<<static_cast<unsigned>(blocks), kWarp>>>({device_sizes.data(), E, R, K, column_tiles}, tiles.data(), most,
                                                       count.data());
  STEP_CUDA(cudaGetLastError());
  int failures = 0;
  const std::vector<Tile> got = tiles.fetch(&failures);
  const int found = count.fetch(&failures)[0];

  // (row, column) -> (expert, end of the group)
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
  comparison.same(-1, -1, found, static_cast<int64_t>(want.size()));
  for (int i = 0; i < std::min(found, most); ++i) {
    const Tile& tile = got[static_cast<size_t>(i)];
    const auto place = want.find({tile.row, tile.column});
    const bool there = place != want.end();
    comparison.check(there, i, 0, tile.row, -1);
    if (!there) continue;
    comparison.same(i, 1, tile.expert, place->second.first);
    comparison.same(i, 2, tile.end_row, place->second.second);
    comparison.same(i, 3, tile.steps, tile.expert == kNoExpert ? 0 : (K + 63) / 64);
    want.erase(place);
  }
  comparison.same(-1, -2, static_cast<int64_t>(want.size()), 0);
  return failures + comparison.report();
}

}  // namespace

int tiles_of_groups() {
  int failures = 0;
  failures += check_tiles("one group", {1000}, 1000, 500, 100, 7);
  failures += check_tiles("empty and odd groups", {0, 1, 128, 0, 0, 129, 127, 5000, 0}, 5500, 700, 64, 132);
  failures += check_tiles("no group", {}, 300, 192, 64, 3);
  failures += check_tiles("no rows in groups", {0, 0, 0}, 300, 193, 64, 3);
  failures += check_tiles("sizes out of range", {-5, 200, INT32_MIN, INT32_MAX, INT32_MAX, 7}, 1000, 300, 64, 5);
  std::mt19937 random(7);
  for (const int E : {31, 32, 33, 64, 129, 1000}) {
    std::vector<int32_t> sizes(static_cast<size_t>(E));
    int R = 100;
    for (int32_t& size : sizes) {
      size = random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % 700);
      R += size;
    }
    for (const int blocks : {1, 132}) {
      char name[64];
      std::snprintf(name, sizeof name, "%d groups, %d blocks", E, blocks);
      failures += check_tiles(name, sizes, R, 400, 256, blocks);
    }
  }
  return failures;
}

}  // namespace anabranch::steps
