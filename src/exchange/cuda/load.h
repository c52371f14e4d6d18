// Loads a kernel on the current device before its first launch.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda/failure.h"
#include "core/status.h"

namespace anabranch::cuda {

template <class Kernel>
ab_status load(Kernel kernel) {
  cudaFuncAttributes attributes;
  const cudaError_t failure = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  return failure == cudaSuccess ? ok() : failed("exchange: loading a kernel", failure);
}

}  // namespace anabranch::cuda
