// Launches kernels on the caller's stream.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "anabranch/types.h"
#include "core/cuda/device.h"
#include "core/cuda/failure.h"
#include "core/cuda/kernel_attributes.h"
#include "core/status.h"

namespace anabranch::cuda {

inline cudaStream_t stream_of(const ab_exec* exec) {
  return exec == nullptr ? nullptr : static_cast<cudaStream_t>(exec->stream);
}

struct Launch {
  int64_t blocks;
  int threads;
  size_t shared_bytes;
  cudaStream_t stream;
  // Programmatic dependent launch: the kernel starts while the previous one on the stream still runs, and must call
  // wait_for_previous_kernel().
  bool overlaps_previous = false;
  int cluster = 1;  // blocks per cluster; divides `blocks`
  // If not 0, the shared memory of an SM is limited to what this many blocks need, and the remaining memory serves as
  // L1. Kernels with many loads in flight need a large L1; a previous kernel may have left it small.
  int resident_blocks = 0;
};

#if defined(__CUDACC__)

// The major compute capabilities, one bit each, for which this file is compiled and whose devices support the overlap.
constexpr unsigned kOverlappingGenerations = [] {
  unsigned generations = 0;
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture >= 900) generations |= 1u << architecture / 100;
  }
  return generations;
}();

// Whether a device belongs to one of these generations. A device of another generation may run code for an older one,
// which does not wait.
constexpr bool can_overlap(unsigned generations, const Device& device) {
  const int major = device.capability / 10;
  return major < 32 && (generations >> major & 1u) != 0;
}

template <unsigned kGenerations = kOverlappingGenerations, class... Parameters, class... Arguments>
ab_status launch(const char* name, void (*kernel)(Parameters...), const Launch& shape, const Arguments&... arguments) {
  if (shape.blocks == 0) return ok();
  AB_RETURN_IF_ERROR(check_blocks(name, shape.blocks));
  const void* const address = reinterpret_cast<const void*>(kernel);
  Device device;
  if (const cudaError_t failure = current_device(&device); failure != cudaSuccess) return failed(name, failure);
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (shape.overlaps_previous && can_overlap(kGenerations, device)) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  cudaError_t failure = cudaSuccess;
  for (bool first_attempt = true;; first_attempt = false) {
    AB_RETURN_IF_ERROR(prepare_shared_memory(name, address, device, shape.shared_bytes, shape.resident_blocks));
    failure = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
    if (failure != cudaErrorInvalidValue || !first_attempt) break;
    // The cached attributes may be those of another context, or of the device before a reset.
    cudaGetLastError();  // clear it
    forget_kernel_attributes(address, device);
  }
  return failure == cudaSuccess ? ok() : failed(name, failure);
}

// A kernel that overlaps_previous calls this before it reads results of the previous kernel. It must not read them by
// __ldg, which requires that nobody writes the data while the kernel runs; the kernel may have begun before the writer
// ended. Data that is read before this call, because its writer is known to have ended, must be read by __ldcg: writes
// of other kernels become visible in L1 only here.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// The previous kernel calls this: from now on the next kernel may start, up to its wait.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

#endif

}  // namespace anabranch::cuda
