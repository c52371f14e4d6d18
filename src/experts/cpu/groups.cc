#include "experts/cpu/groups.h"

#include <algorithm>

namespace anabranch {
namespace {

constexpr int64_t kRowStep = 16;      // granularity of tile sizes, except the last tile of a group
constexpr int64_t kMinColumns = 128;  // narrower GEMMs waste the packing of their rows
constexpr int64_t kEnoughTasks = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t cut_range(int32_t expert, int64_t begin, int64_t rows, RowTile* tiles) {
  if (rows == 0) return 0;
  const int64_t size = ceil_div(ceil_div(rows, ceil_div(rows, kTileRows)), kRowStep) * kRowStep;
  int64_t count = 0;
  for (int64_t first = 0; first < rows; first += size) {
    tiles[count++] = {expert, static_cast<int32_t>(begin + first), static_cast<int32_t>(std::min(size, rows - first))};
  }
  return count;
}

}  // namespace

void clip_groups(const int32_t* group_sizes, const int32_t* tokens, int64_t R, int64_t E, RowRange* groups) {
  int64_t begin = 0;
  for (int64_t e = 0; e < E; ++e) {
    const int64_t size = std::clamp<int64_t>(group_sizes[e], 0, R - begin);
    int64_t rows = size;
    while (tokens != nullptr && rows > 0 && tokens[begin + rows - 1] < 0) --rows;
    groups[e] = {begin, rows};
    begin += size;
  }
}

int64_t cut_tiles(const RowRange* groups, int64_t R, int64_t E, RowTile* tiles) {
  int64_t count = 0;
  int64_t covered = 0;
  for (int64_t e = 0; e < E; ++e) {
    if (groups[e].rows == 0) continue;
    count += cut_range(-1, covered, groups[e].begin - covered, tiles + count);
    count += cut_range(static_cast<int32_t>(e), groups[e].begin, groups[e].rows, tiles + count);
    covered = groups[e].begin + groups[e].rows;
  }
  return count + cut_range(-1, covered, R - covered, tiles + count);
}

ColumnParts::ColumnParts(int64_t num_columns, int64_t row_tiles, int64_t step) : columns(num_columns) {
  const int64_t target_parts = ceil_div(kEnoughTasks, std::max<int64_t>(row_tiles, 1));
  const int64_t even = ceil_div(ceil_div(num_columns, target_parts), step) * step;
  width = std::min(num_columns, std::max(even, kMinColumns));
}

}  // namespace anabranch
