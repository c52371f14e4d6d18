// Describes the CUDA library and the devices.
#include <cstdio>

#include <cuda_runtime.h>

#include "anabranch/cuda.h"
#include "core/cuda/path.h"

namespace {

constexpr int kMinCapability = 80;

// Appends to a text of `size` bytes, with the arguments of snprintf.
template <class... Values>
void append(char* text, size_t size, size_t* used, const char* format, Values... values) {
  if (*used >= size) return;
  const int written = std::snprintf(text + *used, size - *used, format, values...);
  if (written > 0) *used += static_cast<size_t>(written);
}

// Appends which kernels the experts try first on a device, and the reason.
void append_path(char* text, size_t size, size_t* used, int device, const anabranch::cuda::Device& device_info) {
  using namespace anabranch::cuda;
  if (device_info.capability < kMinCapability) return;
  append(text, size, used, "experts on device %d=", device);
  const ab_status status = check_path();
  const PathChoice choice = first_path(device_info);
  if (status.code != AB_OK) {
    append(text, size, used, "%s\n", status.message);
  } else if (choice.hopper_unsupported_reason == nullptr) {
    append(text, size, used, "%s kernels first\n", name_of(choice.path));
  } else {
    append(text, size, used, "%s kernels first, since %s\n", name_of(choice.path), choice.hopper_unsupported_reason);
  }
}

}  // namespace

extern "C" void ab_cuda_describe(char* text, size_t size) {
  if (text == nullptr || size == 0) return;
  text[0] = '\0';
  size_t used = 0;
  int runtime = 0;
  int driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  append(text, size, &used, "version=%s\ncuda=%d.%d\ndriver=%d.%d\n", ANABRANCH_VERSION, runtime / 1000,
         runtime % 1000 / 10, driver / 1000, driver % 1000 / 10);
  int count = 0;
  const cudaError_t failure = cudaGetDeviceCount(&count);
  if (failure != cudaSuccess || count == 0) {
    cudaGetLastError();  // clear it
    append(text, size, &used, "error=%s\n", failure == cudaSuccess ? "no device" : cudaGetErrorString(failure));
    return;
  }
  bool usable = false;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    const int capability = properties.major * 10 + properties.minor;
    usable = usable || capability >= kMinCapability;
    append(text, size, &used, "device %d=%s, compute capability %d.%d, %d multiprocessors, %zu MiB\n", device,
           properties.name, properties.major, properties.minor, properties.multiProcessorCount,
           properties.totalGlobalMem >> 20);
    append_path(text, size, &used, device, {properties.multiProcessorCount, capability});
  }
  if (!usable) append(text, size, &used, "error=%s\n", "no device of compute capability 8.0 or newer");
}
