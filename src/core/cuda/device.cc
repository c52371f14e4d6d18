#include "core/cuda/device.h"

#include <atomic>
#include <mutex>
#include <utility>

#include "core/cuda/failure.h"
#include "core/status.h"

namespace anabranch::cuda {
namespace {

cudaError_t read_properties(int number, Device* result) {
  int major = 0;
  int minor = 0;
  for (const auto& [value, attribute] :
       {std::pair{&major, cudaDevAttrComputeCapabilityMajor}, std::pair{&minor, cudaDevAttrComputeCapabilityMinor},
        std::pair{&result->multiprocessors, cudaDevAttrMultiProcessorCount},
        std::pair{&result->shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
        std::pair{&result->max_block_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin}}) {
    const cudaError_t failure = cudaDeviceGetAttribute(value, attribute, number);
    if (failure != cudaSuccess) return failure;
  }
  result->capability = 10 * major + minor;
  result->number = number;
  return cudaSuccess;
}

// The properties of a device, once they have been read. The mutex serialises writers; `known` publishes the value.
struct CachedDevice {
  std::atomic<bool> known{false};
  Device device;
};
constexpr int kCachedDevices = 64;  // the properties of further devices are read at every call
CachedDevice cached_devices[kCachedDevices];
std::mutex mutex;

cudaError_t find_properties(int number, Device* result) {
  if (number < 0 || number >= kCachedDevices) return read_properties(number, result);
  CachedDevice& cached = cached_devices[number];
  if (!cached.known.load(std::memory_order_acquire)) {
    std::lock_guard lock(mutex);
    if (!cached.known.load(std::memory_order_relaxed)) {
      const cudaError_t failure = read_properties(number, &cached.device);
      if (failure != cudaSuccess) return failure;
      cached.known.store(true, std::memory_order_release);
    }
  }
  *result = cached.device;
  return cudaSuccess;
}

}  // namespace

cudaError_t current_device(Device* result) {
  int number = 0;
  cudaError_t failure = cudaGetDevice(&number);
  if (failure == cudaSuccess) failure = find_properties(number, result);
  if (failure != cudaSuccess) cudaGetLastError();  // clear it
  return failure;
}

ab_status find_device(const char* operation, Device* result) {
  const cudaError_t failure = current_device(result);
  if (failure != cudaSuccess) {
    return error(code_of(failure), "%s: no usable GPU: %s", operation, cudaGetErrorString(failure));
  }
  if (result->capability < 80) {
    return error(AB_UNSUPPORTED, "%s: got a device of compute capability %d.%d, expected 8.0 or newer", operation,
                 result->capability / 10, result->capability % 10);
  }
  return ok();
}

}  // namespace anabranch::cuda
