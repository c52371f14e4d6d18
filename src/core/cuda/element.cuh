// Loads an element of a float array whose dtype is known only at run time.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace anabranch::cuda {

__device__ __forceinline__ float load_float(const void* values, int32_t dtype, int64_t i) {
  return with_float_type(dtype, [&]<class T>(T) { return to_float(static_cast<const T*>(values)[i]); });
}

}  // namespace anabranch::cuda
