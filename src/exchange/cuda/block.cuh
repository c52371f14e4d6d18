// What one block of the kernels of exchanges does. All threads of the block make the calls.
#pragma once

#include <cstdint>

#include "exchange/cuda/system_memory.cuh"
#include "exchange/protocol.h"

namespace anabranch::cuda {

using DeviceProtocol = exchange::Protocol<SystemMemory>;

constexpr int kCopyThreads = 256;

template <class Bytes>
__device__ __forceinline__ void copy(const Bytes* from, Bytes* to, int64_t count) {
  constexpr int kLoads = 8;  // in flight per thread
  for (int64_t first = threadIdx.x; first < count; first += kCopyThreads * kLoads) {
    Bytes words[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i * kCopyThreads < count) words[i] = __ldcs(from + first + i * kCopyThreads);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i * kCopyThreads < count) to[first + i * kCopyThreads] = words[i];
    }
  }
}

template <class Bytes>
__device__ __forceinline__ void fill_with_ones(Bytes* to, int64_t count) {
  auto* bytes = reinterpret_cast<unsigned char*>(to);
  const int64_t end = count * static_cast<int64_t>(sizeof(Bytes));
  for (int64_t i = threadIdx.x; i < end; i += kCopyThreads) bytes[i] = 0xff;
}

// Whether the failure word says that what this block has read is valid.
__device__ __forceinline__ bool has_read_valid_data(const DeviceProtocol& protocol) {
  __syncthreads();  // all threads have read
  return __syncthreads_and(threadIdx.x != 0 || protocol.read_valid_data()) != 0;
}

// Counts the blocks of the grid that have read a buffer. Whether this is the last one: it may release the buffer.
__device__ __forceinline__ bool is_last_block(uint32_t* finished) {
  __syncthreads();  // all threads have read
  bool is_last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(finished, 1u) == gridDim.x - 1;
    if (is_last) *finished = 0;
    __threadfence();
  }
  return __syncthreads_or(is_last) != 0;
}

}  // namespace anabranch::cuda
