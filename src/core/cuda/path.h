// Which kernels the experts may run on: the device and a variable of the environment say it.
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/cuda/device.h"

namespace anabranch::cuda {

// In the order in which they are tried.
enum class Path : int32_t {
  hopper,   // wgmma, on compute capability 9.0
  portable  // mma.sync, on compute capability 8.0 and newer
};
const char* name_of(Path path);

struct PathChoice {
  Path path = Path::portable;
  const char* why_not_hopper = nullptr;  // unless the path is hopper
};

// The first path that may be taken on a device: ANABRANCH_CUDA_PATH may name a later one than the device would have.
PathChoice first_path(const Device& device);

// Whether that variable was understood.
ab_status check_path();

// The current device, for an operation of the experts; unsupported where that variable was not understood, too.
ab_status find_device_of_experts(const char* operation, Device* device);

}  // namespace anabranch::cuda
