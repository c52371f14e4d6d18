// CUDA's failures as statuses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/status.h"

namespace anabranch::cuda {

// Unsupported is only what another way of computing may avoid: whoever falls back on it goes on with the same device.
// After most other failures, such as an illegal access of an earlier kernel, the device is of no use any more.
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

// The status of a call of the runtime that failed; the runtime forgets the failure, unless it is there to stay.
inline ab_status failed(const char* name, cudaError_t failure) {
  cudaGetLastError();
  return error(code_of(failure), "%s: %s", name, cudaGetErrorString(failure));
}

// A grid of one dimension has at most 2^31 - 1 blocks.
inline ab_status check_blocks(const char* name, int64_t blocks) {
  if (blocks <= INT32_MAX) return ok();
  return error(AB_UNSUPPORTED, "%s: got %lld blocks, expected at most 2^31 - 1", name, static_cast<long long>(blocks));
}

}  // namespace anabranch::cuda
