// The properties of the current device that operations use.
#pragma once

#include "anabranch/types.h"

namespace anabranch::cuda {

struct Device {
  int multiprocessors = 0;
  int capability = 0;  // 10 major + minor

  bool is_hopper() const { return capability == 90; }
};

// Finds the current device. Returns AB_UNSUPPORTED without a device, or if its compute capability is below 8.0.
ab_status find_device(const char* operation, Device* result);

}  // namespace anabranch::cuda
