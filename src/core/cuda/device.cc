#include "core/cuda/device.h"

#include <cuda_runtime.h>

#include <utility>

#include "core/cuda/failure.h"
#include "core/status.h"

namespace anabranch::cuda {

ab_status find_device(const char* operation, Device* result) {
  int device = 0;
  int major = 0;
  int minor = 0;
  cudaError_t failure = cudaGetDevice(&device);
  for (const auto& [value, attribute] :
       {std::pair{&major, cudaDevAttrComputeCapabilityMajor}, std::pair{&minor, cudaDevAttrComputeCapabilityMinor},
        std::pair{&result->multiprocessors, cudaDevAttrMultiProcessorCount}}) {
    if (failure == cudaSuccess) failure = cudaDeviceGetAttribute(value, attribute, device);
  }
  if (failure != cudaSuccess) {
    cudaGetLastError();  // clear it
    return error(code_of(failure), "%s: no usable GPU: %s", operation, cudaGetErrorString(failure));
  }
  if (major < 8) {
    return error(AB_UNSUPPORTED, "%s: got a device of compute capability %d.%d, expected 8.0 or newer", operation,
                 major, minor);
  }
  result->capability = 10 * major + minor;
  return ok();
}

}  // namespace anabranch::cuda
