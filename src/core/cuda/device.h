// What an operation must know of the current device.
#pragma once

#include "anabranch/types.h"

namespace anabranch::cuda {

// The number of multiprocessors of the current device; unsupported where that is no Hopper GPU (compute capability
// 9.0).
ab_status find_hopper(const char* operation, int* multiprocessors);

}  // namespace anabranch::cuda
