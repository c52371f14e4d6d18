// Kernels by the size of a logit. From Hopper on, forward kernels of softmax and all backward kernels have an instance
// for 2 bytes (bfloat16, float16) and one for 4 (float32): 2 to 6% faster forward, up to 20% backward, than an instance
// that reads the size at run time. Older devices use the latter; so do all
// devices in the other forward kernels.
#pragma once

#include "core/cuda/failure.h"
#include "core/status.h"

namespace anabranch::cuda {

// kSize: 2, 4, or 0: any. Whether the device that is compiled for uses such an instance; all others have no code. An
// emulated GPU is an old one.
template <int kSize>
__device__ constexpr bool has_logit_size() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return kSize != 0;
#else
  return kSize == 0;
#endif
}

// What an instance without code does: a launch of it must not look as if it had done its work.
__device__ __forceinline__ void fail_without_code() { __trap(); }

template <class Call>
struct KernelsBySize {
  using Kernel = void (*)(Call);
  Kernel of_any = nullptr;
  Kernel of_2 = nullptr;
  Kernel of_4 = nullptr;
};

// The instance for logits of `size` bytes that the current device's code has.
template <class Call>
ab_status choose_by_size(const char* name, const KernelsBySize<Call>& kernels, size_t size, void (**chosen)(Call)) {
  cudaFuncAttributes attributes{};
  const cudaError_t failure = cudaFuncGetAttributes(&attributes, kernels.of_any);
  if (failure != cudaSuccess) return failed(name, failure);
  constexpr int kHopper = 90;
  *chosen = attributes.ptxVersion < kHopper ? kernels.of_any : size == 2 ? kernels.of_2 : kernels.of_4;
  return ok();
}

}  // namespace anabranch::cuda
