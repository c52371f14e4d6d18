// A part of the rows of every group, for GEMMs that begin before all rows have arrived.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// The rows of a tile of the GEMMs that take parts.
constexpr int32_t kPartTileRows = 128;

// The rows of each group inside two bounds, or those outside. A bound is a whole number of tiles after the first row of
// the group, or the end of the group, so both parts together have as many tiles as the group.
struct RowPart {
  const int32_t* bounds = nullptr;  // [E, 2], on the device; nullptr: all rows
  bool inside = false;
};

}  // namespace anabranch::cuda
