// Converts CUDA errors to statuses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/status.h"

namespace anabranch::cuda {

// AB_UNSUPPORTED is reserved for errors that a fallback on the same device can avoid. After most other errors, such as
// an illegal access in an earlier kernel, the device is no longer usable.
constexpr ab_status_code code_of(cudaError_t failure) {
  switch (failure) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice: return AB_UNSUPPORTED;
    case cudaErrorMemoryAllocation:
    case cudaErrorLaunchOutOfResources: return AB_OUT_OF_MEMORY;
    default: return AB_INTERNAL;
  }
}

// The status of a failed runtime call. Clears the error of the runtime, unless it is sticky.
inline ab_status failed(const char* name, cudaError_t failure) {
  cudaGetLastError();
  return error(code_of(failure), "%s: %s", name, cudaGetErrorString(failure));
}

// A one-dimensional grid has at most 2^31 - 1 blocks.
inline ab_status check_blocks(const char* name, int64_t blocks) {
  if (blocks <= INT32_MAX) return ok();
  return error(AB_UNSUPPORTED, "%s: got %lld blocks, expected at most 2^31 - 1", name, static_cast<long long>(blocks));
}

}  // namespace anabranch::cuda
