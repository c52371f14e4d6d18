// An element of an array of floats whose dtype is known at run time alone.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace anabranch::cuda {

__device__ __forceinline__ float load_float(const void* values, int32_t dtype, int64_t i) {
  return with_float_type(dtype, [&]<class T>(T) { return to_float(static_cast<const T*>(values)[i]); });
}

}  // namespace anabranch::cuda
