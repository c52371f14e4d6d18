// The kernels that the experts may run on, as determined by the device and an environment variable.
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/cuda/device.h"

namespace anabranch::cuda {

// Sets of kernels, in the order in which they are tried.
enum class Path : int32_t {
  hopper,   // wgmma, on compute capability 9.0
  portable  // mma.sync, on compute capability 8.0 and newer
};
const char* name_of(Path path);

struct PathChoice {
  Path path = Path::portable;
  const char* hopper_unsupported_reason = nullptr;  // set unless the path is hopper
};

// The first path to try on a device. ANABRANCH_CUDA_PATH may exclude an earlier path that the device supports.
PathChoice first_path(const Device& device);

// Returns an error if ANABRANCH_CUDA_PATH has an unknown value.
ab_status check_path();

// find_device() for an operation of the experts. Also returns AB_UNSUPPORTED if ANABRANCH_CUDA_PATH has an unknown
// value.
ab_status find_device_of_experts(const char* operation, Device* device);

}  // namespace anabranch::cuda
