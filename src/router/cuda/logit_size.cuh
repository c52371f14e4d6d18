// Kernels specialised by the size of a logit. On Hopper and newer, forward kernels of softmax and all backward kernels
// have an instance for 2 bytes (bfloat16, float16) and one for 4 (float32). They are 2 to 6% faster forward, and up to
// 20% backward, than the instance that reads the size at run time. Older devices, and the other forward kernels on all
// devices, use the latter.
#pragma once

#include "core/cuda/device.h"
#include "core/cuda/failure.h"
#include "core/cuda/kernel_attributes.h"
#include "core/status.h"

namespace anabranch::cuda {

// Whether the target architecture uses the instance for kSize (2, 4, or 0: any size). The other instances contain no
// code. The emulator counts as an old device.
template <int kSize>
__device__ constexpr bool has_logit_size() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return kSize != 0;
#else
  return kSize == 0;
#endif
}

// Called by an instance without code: launching it must not look like success.
__device__ __forceinline__ void fail_without_code() { __trap(); }

template <class Call>
struct KernelsBySize {
  using Kernel = void (*)(Call);
  Kernel any_size = nullptr;
  Kernel two_bytes = nullptr;
  Kernel four_bytes = nullptr;
};

// Chooses the instance for logits of `size` bytes that has code for the current device.
template <class Call>
ab_status choose_by_size(const char* name, const KernelsBySize<Call>& kernels, size_t size, void (**chosen)(Call)) {
  Device device;
  int ptx_version = 0;
  cudaError_t failure = current_device(&device);
  if (failure == cudaSuccess) {
    failure = find_ptx_version(reinterpret_cast<const void*>(kernels.any_size), device, &ptx_version);
  }
  if (failure != cudaSuccess) return failed(name, failure);
  constexpr int kHopper = 90;
  *chosen = ptx_version < kHopper ? kernels.any_size : size == 2 ? kernels.two_bytes : kernels.four_bytes;
  return ok();
}

}  // namespace anabranch::cuda
