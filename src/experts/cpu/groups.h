// Rows of experts as tiles of work. group_sizes is data: whatever it holds, every row lies in [0, R).
#pragma once

#include <cstdint>

namespace anabranch {

struct RowRange {
  int64_t begin;
  int64_t rows;
};

// A tile never crosses experts. expert -1: rows of zeros (padding at the end of a group, or past the last group).
struct RowTile {
  int32_t expert;
  int32_t begin;
  int32_t rows;
};

constexpr int64_t kTileRows = 256;

// At most this many tiles cover R rows of E experts.
constexpr int64_t max_row_tiles(int64_t R, int64_t E) { return 2 * (R / kTileRows + E) + 2; }

// groups[e]: the rows of expert e, sizes clipped to [0, rows left], less the padding at the end (rows with a negative
// token; tokens == nullptr: no padding).
void clip_groups(const int32_t* group_sizes, const int32_t* tokens, int64_t R, int64_t E, RowRange* groups);

// Covers all R rows; returns the number of tiles. A group is cut into equal tiles of at most kTileRows rows.
int64_t cut_tiles(const RowRange* groups, int64_t R, int64_t E, RowTile* tiles);

// Columns of a phase in equal parts, so that few row tiles still give work to many threads. Depends on the routing and
// the shape alone, never on the number of threads: a part is computed in one go, in one order.
struct ColumnParts {
  int64_t columns;
  int64_t width;

  // step: what `width` is a multiple of.
  ColumnParts(int64_t num_columns, int64_t row_tiles, int64_t step = 64);
  int64_t count() const { return width == 0 ? 0 : (columns + width - 1) / width; }
  int64_t begin(int64_t part) const { return part * width; }
  int64_t end(int64_t part) const { return part * width + width < columns ? part * width + width : columns; }
};

}  // namespace anabranch
