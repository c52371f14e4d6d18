// The properties of the current device that operations use.
#pragma once

#include "anabranch/types.h"

namespace anabranch::cuda {

struct Device {
  int multiprocessors = 0;
  int capability = 0;  // 10 major + minor

  bool is_hopper() const { return capability == 90; }
};

// Finds the current device. Returns AB_UNSUPPORTED if there is none of compute capability 8.0 or newer.
ab_status find_device(const char* operation, Device* result);

}  // namespace anabranch::cuda
