// A part of the rows of every group, for GEMMs that begin before all rows have arrived.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// The rows of a group between two of its rows, or all others. Both bounds are whole tiles after the group's first row,
// or its end, so the parts of a group have no more tiles than the group.
struct RowPart {
  const int32_t* bounds = nullptr;  // [E, 2], on the device; nullptr: all rows
  bool inside = false;
};

}  // namespace anabranch::cuda
