// The properties of the current device that operations use.
#pragma once

#include <cuda_runtime_api.h>

#include "anabranch/types.h"

namespace anabranch::cuda {

struct Device {
  int multiprocessors = 0;
  int capability = 0;              // 10 major + minor
  int shared_bytes = 0;            // shared memory of a multiprocessor
  int max_block_shared_bytes = 0;  // the most of it that a block can have
  int number = 0;                  // of the CUDA runtime

  bool is_hopper() const { return capability == 90; }
};

// Finds the current device. The properties of a device are read once and then served without a lock. A failure is
// returned, not stored: a later call may succeed. The runtime's error is cleared.
cudaError_t current_device(Device* result);

// current_device() for an operation. Returns AB_UNSUPPORTED without a device, or if its compute capability is
// below 8.0.
ab_status find_device(const char* operation, Device* result);

}  // namespace anabranch::cuda
