// What an operation must know of the current device.
#pragma once

#include "anabranch/types.h"

namespace anabranch::cuda {

struct Device {
  int multiprocessors = 0;
  int capability = 0;  // 10 major + minor

  bool is_hopper() const { return capability == 90; }
};

// Unsupported where there is no device of compute capability 8.0 or newer.
ab_status find_device(const char* operation, Device* found);

}  // namespace anabranch::cuda
