// Counts given by a caller, in any count dtype.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace anabranch {

struct Counts {
  const void* data = nullptr;
  int32_t dtype = AB_INT32;
};

namespace {

AB_INLINE double count_at(const Counts& counts, int64_t i) {
  switch (counts.dtype) {
    case AB_UINT8: return static_cast<const uint8_t*>(counts.data)[i];
    case AB_INT16: return static_cast<const int16_t*>(counts.data)[i];
    case AB_INT32: return static_cast<const int32_t*>(counts.data)[i];
    case AB_INT64: return static_cast<double>(static_cast<const int64_t*>(counts.data)[i]);
    default:
      return with_float_type(counts.dtype,
                             [&]<class T>(T) { return double{to_float(static_cast<const T*>(counts.data)[i])}; });
  }
}

}  // namespace
}  // namespace anabranch
