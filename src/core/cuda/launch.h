// Launches kernels on the caller's stream.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "anabranch/types.h"
#include "core/cuda/failure.h"
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

// Whether the current device belongs to one of these generations. A device of another generation may run code for an
// older one, which does not wait.
template <unsigned kGenerations>
bool can_overlap() {
  int device = 0;
  int major = 0;
  return kGenerations != 0 && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major < 32 &&
         (kGenerations >> major & 1u) != 0;
}

// Limits the shared memory of an SM to `bytes` for the kernel's blocks, plus what the system reserves. This is a hint:
// its failure does not fail the launch.
template <class Kernel>
void share_memory(Kernel kernel, size_t bytes) {
  constexpr size_t kReservedBytes = 16 << 10;  // 1 KiB per block
  int device = 0;
  int capacity = 0;
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&capacity, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) == cudaSuccess &&
      capacity > 0) {
    const size_t percent = (bytes + kReservedBytes) * 100 / static_cast<size_t>(capacity) + 1;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             static_cast<int>(percent < 100 ? percent : 100)) == cudaSuccess) {
      return;
    }
  }
  cudaGetLastError();  // clear it
}

template <unsigned kGenerations = kOverlappingGenerations, class... Parameters, class... Arguments>
ab_status launch(const char* name, void (*kernel)(Parameters...), const Launch& shape, const Arguments&... arguments) {
  if (shape.blocks == 0) return ok();
  AB_RETURN_IF_ERROR(check_blocks(name, shape.blocks));
  constexpr size_t kDefaultSharedBytes = 48 << 10;
  if (shape.shared_bytes > kDefaultSharedBytes) {
    const cudaError_t failure =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes));
    if (failure == cudaErrorInvalidValue) {
      cudaGetLastError();  // clear it
      return error(AB_UNSUPPORTED, "%s: a block needs %zu bytes of shared memory, more than the device has", name,
                   shape.shared_bytes);
    }
    if (failure != cudaSuccess) return failed(name, failure);
  }
  if (shape.resident_blocks > 0) {
    share_memory(kernel, shape.shared_bytes * static_cast<size_t>(shape.resident_blocks));
  }
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (shape.overlaps_previous && can_overlap<kGenerations>()) {
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
  const cudaError_t failure = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
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
