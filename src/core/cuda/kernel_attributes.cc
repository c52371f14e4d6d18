#include "core/cuda/kernel_attributes.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/cuda/failure.h"
#include "core/status.h"

namespace anabranch::cuda {
namespace {

// One kernel on one device. 0: not known.
struct Entry {
  std::atomic<uint64_t> key;
  std::atomic<int> shared_bytes;  // the limit of a block's dynamic shared memory
  std::atomic<int> carveout;      // the preferred one, in percent
  std::atomic<int> ptx_version;
};

constexpr int kEntryBits = 10;
constexpr unsigned kEntries = 1u << kEntryBits;
constexpr unsigned kProbes = 32;
Entry entries[kEntries];  // a hash table with linear probing; entries are never removed

constexpr int kDeviceBits = 6;  // an address has at most 57 bits

// Held while an attribute is changed, so that the cache agrees with the runtime. Each device has its own: the change
// may load the kernel, which may wait until the device is idle. Kernels of an exchange on that device may wait for a
// device whose host thread is about to change an attribute, too.
std::mutex& mutex_of(const Device& device) {
  static std::mutex mutexes[1 << kDeviceBits];
  return mutexes[static_cast<unsigned>(device.number) % (1u << kDeviceBits)];
}

// The entry of a kernel, or nullptr if the table has no place for it.
Entry* find_entry(const void* kernel, const Device& device) {
  if (device.number >> kDeviceBits != 0) return nullptr;
  const uint64_t key =
      static_cast<uint64_t>(reinterpret_cast<uintptr_t>(kernel)) << kDeviceBits | static_cast<unsigned>(device.number);
  constexpr uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;  // Fibonacci hashing
  const auto first = static_cast<unsigned>(key * kGoldenRatio >> (64 - kEntryBits));
  for (unsigned i = 0; i < kProbes; ++i) {
    Entry& entry = entries[(first + i) % kEntries];
    uint64_t found = entry.key.load(std::memory_order_relaxed);
    // If another thread takes the entry first, `found` becomes its key.
    if (found == 0 && entry.key.compare_exchange_strong(found, key, std::memory_order_relaxed)) return &entry;
    if (found == key) return &entry;
  }
  return nullptr;
}

// See prepare_shared_memory(). entry may be nullptr.
cudaError_t allow_block(Entry* entry, const void* kernel, const Device& device, size_t given_bytes) {
  const int bytes = static_cast<int>(std::min<size_t>(given_bytes, INT32_MAX));
  const auto is_allowed = [&] {
    return entry != nullptr && entry->shared_bytes.load(std::memory_order_acquire) >= bytes;
  };
  if (is_allowed()) return cudaSuccess;
  std::lock_guard lock(mutex_of(device));
  if (is_allowed()) return cudaSuccess;
  const cudaError_t failure = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (failure == cudaSuccess && entry != nullptr) entry->shared_bytes.store(bytes, std::memory_order_release);
  return failure;
}

void limit_blocks(Entry* entry, const void* kernel, const Device& device, size_t bytes) {
  constexpr size_t kReservedBytes = 16 << 10;  // 1 KiB per block
  if (device.shared_bytes <= 0) return;
  const size_t percent = (bytes + kReservedBytes) * 100 / static_cast<size_t>(device.shared_bytes) + 1;
  const int carveout = static_cast<int>(std::min<size_t>(percent, 100));
  if (entry != nullptr && entry->carveout.load(std::memory_order_acquire) == carveout) return;
  std::lock_guard lock(mutex_of(device));
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout) != cudaSuccess) {
    cudaGetLastError();  // clear it
  } else if (entry != nullptr) {
    entry->carveout.store(carveout, std::memory_order_release);
  }
}

}  // namespace

ab_status prepare_shared_memory(const char* name, const void* kernel, const Device& device, size_t block_bytes,
                                int resident_blocks) {
  constexpr size_t kDefaultBlockBytes = 48 << 10;
  if (block_bytes <= kDefaultBlockBytes && resident_blocks == 0) return ok();
  Entry* const entry = find_entry(kernel, device);
  if (block_bytes > kDefaultBlockBytes) {
    const cudaError_t failure = allow_block(entry, kernel, device, block_bytes);
    if (failure == cudaErrorInvalidValue) {
      cudaGetLastError();  // clear it
      return error(AB_UNSUPPORTED, "%s: a block needs %zu bytes of shared memory, more than the device has", name,
                   block_bytes);
    }
    if (failure != cudaSuccess) return failed(name, failure);
  }
  if (resident_blocks > 0) {
    limit_blocks(entry, kernel, device, block_bytes * static_cast<size_t>(resident_blocks));
  }
  return ok();
}

cudaError_t find_ptx_version(const void* kernel, const Device& device, int* version) {
  Entry* const entry = find_entry(kernel, device);
  if (entry != nullptr) *version = entry->ptx_version.load(std::memory_order_relaxed);
  if (entry != nullptr && *version != 0) return cudaSuccess;
  cudaFuncAttributes attributes{};
  const cudaError_t failure = cudaFuncGetAttributes(&attributes, kernel);
  if (failure != cudaSuccess) return failure;
  *version = attributes.ptxVersion;
  if (entry != nullptr) entry->ptx_version.store(*version, std::memory_order_relaxed);
  return cudaSuccess;
}

void forget_kernel_attributes(const void* kernel, const Device& device) {
  Entry* const entry = find_entry(kernel, device);
  if (entry == nullptr) return;
  std::lock_guard lock(mutex_of(device));
  entry->shared_bytes.store(0, std::memory_order_relaxed);
  entry->carveout.store(0, std::memory_order_relaxed);
}

}  // namespace anabranch::cuda
