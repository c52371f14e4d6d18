// Rows of experts as tiles of work. group_sizes is data: every row stays in [0, R), whatever it holds.
#pragma once

#include <cstdint>

namespace anabranch {

struct RowRange {
  int64_t begin;
  int64_t rows;
};

// A tile never crosses experts. expert -1: rows of zeros (padding at the end of a group, or after the last group).
struct RowTile {
  int32_t expert;
  int32_t begin;
  int32_t rows;
};

constexpr int64_t kTileRows = 256;

// Upper bound on the tiles that cover R rows of E experts.
constexpr int64_t max_row_tiles(int64_t R, int64_t E) { return 2 * (R / kTileRows + E) + 2; }

// groups[e]: the rows of expert e. Sizes are clipped to the remaining rows, and padding at the end of a group (rows
// with a negative token) is removed. tokens == nullptr: no padding.
void clip_groups(const int32_t* group_sizes, const int32_t* tokens, int64_t R, int64_t E, RowRange* groups);

// Covers all R rows and returns the number of tiles. A group is split into equal tiles of at most kTileRows rows.
int64_t cut_tiles(const RowRange* groups, int64_t R, int64_t E, RowTile* tiles);

// Splits the columns of a phase into equal parts, so that few row tiles still occupy many threads. The split depends
// only on routing and shape, not on the number of threads: each part is computed by one task in a fixed order.
struct ColumnParts {
  int64_t columns;
  int64_t width;

  // The width of a part is a multiple of `step`.
  ColumnParts(int64_t num_columns, int64_t row_tiles, int64_t step = 64);
  int64_t count() const { return width == 0 ? 0 : (columns + width - 1) / width; }
  int64_t begin(int64_t part) const { return part * width; }
  int64_t end(int64_t part) const { return part * width + width < columns ? part * width + width : columns; }
};

}  // namespace anabranch
