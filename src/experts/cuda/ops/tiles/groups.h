// Groups of rows: the rows of each expert, which stand together.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// R rows in E groups. Negative sizes count as 0, rows past R are cut, and what is left past all groups is group E.
struct Groups {
  const int32_t* sizes;  // [E], on the device
  int32_t E;
  int32_t R;
};

// Of sizes that the host has checked.
inline Groups groups_of(const int32_t* sizes, int64_t E, int64_t R) {
  return {sizes, static_cast<int32_t>(E), static_cast<int32_t>(R)};
}

}  // namespace anabranch::cuda
