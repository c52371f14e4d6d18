// Groups of rows: the contiguous rows of each expert.
#pragma once

#include <cstdint>

#include "experts/cuda/ops/expert_range.h"

namespace anabranch::cuda {

// R rows in E groups. Negative sizes count as 0, rows beyond R are dropped, and rows after all groups form group E.
struct Groups {
  const int32_t* sizes;  // [E], on the device
  int32_t E;
  int32_t R;
  int32_t first = 0;  // GEMMs over rows compute those of groups first ... last
  int32_t last = INT32_MAX;
};

// Requires that E and R fit int32.
inline Groups groups_of(const int32_t* sizes, int64_t E, int64_t R, const ExpertRange& range = {}) {
  Groups groups{sizes, static_cast<int32_t>(E), static_cast<int32_t>(R)};
  groups.first = static_cast<int32_t>(range.first);
  if (range.end < E) groups.last = static_cast<int32_t>(range.end) - 1;
  return groups;
}

// Upper bound on the tiles of `rows` rows each that cover R rows in E groups. Rows after the groups are one more group.
constexpr int64_t max_group_row_tiles(int64_t R, int64_t E, int64_t rows) { return (R + rows - 1) / rows + E + 1; }

}  // namespace anabranch::cuda
