// The parts of the CUDA runtime and of CUDA C++ that the project uses, on the emulator.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator.h"
#include "shared_memory.h"

#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__  // the standard library also uses this name
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

static const emulation::Dim3& threadIdx = emulation::thread_index;
static const emulation::Dim3& blockIdx = emulation::block_index;
static const emulation::Dim3& blockDim = emulation::block_size;
static const emulation::Dim3& gridDim = emulation::grid_size;

using std::max;
using std::min;

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct dim3 {
  unsigned x, y, z;
  dim3() : dim3(1) {}
  explicit dim3(unsigned size) : x(size), y(1), z(1) {}
};

inline void __syncthreads() { emulation::sync_block(); }
inline int __syncthreads_or(int predicate) {
  static bool any;
  emulation::sync_block();
  if (threadIdx.x == 0) any = false;
  emulation::sync_block();
  any = any || predicate != 0;
  emulation::sync_block();
  return any;
}
inline int __syncthreads_and(int predicate) { return !__syncthreads_or(!predicate); }
inline void __threadfence() {}
inline void __syncwarp(unsigned = 0) {
  const char nothing = 0;
  emulation::publish(&nothing, 1);
}
// width: a power of two; lanes exchange values within groups of this size.
template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  const int own = static_cast<int>(threadIdx.x % 32);
  return emulation::value_of_lane(value, own / width * width + lane % width);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  return emulation::value_of_lane(value, static_cast<int>(threadIdx.x % 32) ^ bits);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance, int width = 32) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return emulation::value_of_lane(value, lane % width < distance ? lane : lane - distance);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int distance, int width = 32) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return emulation::value_of_lane(value, lane % width + distance >= width ? lane : lane + distance);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const char mine = predicate != 0;
  const char (*published)[64] = emulation::publish(&mine, 1);
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) lanes |= static_cast<unsigned>(published[lane][0]) << lane;
  return lanes;
}
inline unsigned __match_any_sync(unsigned, int value) {
  const char (*published)[64] = emulation::publish(&value, sizeof(value));
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    lanes |= static_cast<unsigned>(std::memcmp(published[lane], &value, sizeof(value)) == 0) << lane;
  }
  return lanes;
}
inline int __all_sync(unsigned lanes, int predicate) { return __ballot_sync(lanes, predicate) == ~0u; }
inline int __any_sync(unsigned lanes, int predicate) { return __ballot_sync(lanes, predicate) != 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  for (int distance = 1; distance < 32; distance *= 2) value = std::max(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  for (int distance = 1; distance < 32; distance *= 2) value = std::min(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned word = 0;
  for (int i = 0; i < 4; ++i) {
    word |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7u) * 8 & 0xffu) << 8 * i;
  }
  return word;
}
template <class T>
T __ldca(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, const T& value) {
  *to = value;
}
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}
template <class T>
T atomicMin(T* at, T value) {
  const T before = *at;
  *at = value < before ? value : before;
  return before;
}
template <class T>
T atomicMax(T* at, T value) {
  const T before = *at;
  *at = value > before ? value : before;
  return before;
}
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
// Rounds down. The double sum is exact, or its error does not affect the float digits.
inline float __fadd_rd(float a, float b) {
  const double sum = static_cast<double>(a) + b;
  const auto nearest = static_cast<float>(sum);
  return nearest > sum ? std::nextafter(nearest, -INFINITY) : nearest;
}
inline unsigned __cvta_generic_to_shared(const void* pointer) {
  return static_cast<unsigned>(static_cast<const char*>(pointer) - emulation::shared_memory());
}
[[noreturn]] inline void __trap() { emulation::fail("a trap"); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

// --- The runtime: equal devices of compute capability 8.0. Their memory is host memory.
enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorMemoryAllocation,
  cudaErrorNoKernelImageForDevice,
  cudaErrorInvalidDeviceFunction,
  cudaErrorInvalidConfiguration,
  cudaErrorInsufficientDriver,
  cudaErrorNoDevice,
  cudaErrorLaunchOutOfResources,
  cudaErrorPeerAccessAlreadyEnabled
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
constexpr int kMaxSharedBytes = 99 << 10;      // per block, on devices with the least
constexpr int kDefaultSharedBytes = 48 << 10;  // per block, unless an attribute of the kernel allows more
struct cudaFuncAttributes {
  int ptxVersion = 80;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal };
constexpr unsigned cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDisableTiming = 2;
constexpr unsigned cudaHostAllocPortable = 1;
constexpr unsigned cudaHostAllocMapped = 2;
constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1;
using cudaStream_t = void*;
using cudaEvent_t = void*;
using cudaGraph_t = void*;
using cudaGraphExec_t = void*;

struct cudaDeviceProp {
  char name[256] = "emulated";
  int major = 8;
  int minor = 0;
  int multiProcessorCount = 3;
  struct {
    char bytes[16] = {};
  } uuid;
};
struct cudaIpcMemHandle_t {
  char reserved[64];
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline const char* cudaGetErrorString(cudaError_t) { return "an emulated error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
// EMULATED_DEVICES is their number, 1 by default. A process uses one of them: all its threads have the same current
// device, and kernels run when they are launched.
inline cudaError_t cudaGetDeviceCount(int* count) {
  const char* devices = std::getenv("EMULATED_DEVICES");
  *count = devices == nullptr ? 1 : std::atoi(devices);
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  emulation::runtime.device = device;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = emulation::runtime.device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceReset() {
  emulation::forget_limits();
  return cudaSuccess;
}
// Counts a call that reads or sets an attribute, and returns its result.
inline cudaError_t attribute_call() {
  ++emulation::runtime.attribute_calls;
  return emulation::runtime.attribute_calls_fail ? cudaErrorMemoryAllocation : cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  properties->uuid.bytes[0] = static_cast<char>(device);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<size_t>(size), "0000:%02x:00.0", static_cast<unsigned>(device) & 0xffu);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* text) {
  *device = static_cast<int>(std::strtol(text + 5, nullptr, 16));
  return cudaSuccess;
}
inline cudaError_t cudaDeviceCanAccessPeer(int* accessible, int, int) {
  *accessible = 1;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (const cudaError_t failure = attribute_call(); failure != cudaSuccess) return failure;
  const cudaDeviceProp properties;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 164 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kMaxSharedBytes; break;
  }
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *free_bytes = *total = size_t{1} << 30;
  return cudaSuccess;
}
// Whole blocks of 2 MiB can be shared with other processes.
template <class T>
cudaError_t cudaMalloc(T** memory, size_t bytes) {
  constexpr size_t kSharedBlock = 2 << 20;
  *memory =
      static_cast<T*>(bytes > 0 && bytes % kSharedBlock == 0 ? emulation::allocate_shared(bytes)
                                                             : std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  if (!emulation::free_shared(memory)) std::free(memory);
  return cudaSuccess;
}
template <class T>
cudaError_t cudaHostAlloc(T** memory, size_t bytes, unsigned) {
  return cudaMalloc(memory, bytes);
}
inline cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  return emulation::export_shared(memory, handle->reserved) ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaIpcOpenMemHandle(void** memory, const cudaIpcMemHandle_t& handle, unsigned) {
  *memory = emulation::open_shared(handle.reserved);
  return *memory == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}
inline cudaError_t cudaIpcCloseMemHandle(void* memory) {
  return emulation::free_shared(memory) ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaSuccess; }
// Captured work runs once, during the capture.
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t, unsigned long long) {
  *executable = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (const cudaError_t failure = attribute_call(); failure != cudaSuccess) return failure;
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout)
    return value <= 100 ? cudaSuccess : cudaErrorInvalidValue;
  if (value > kMaxSharedBytes) return cudaErrorInvalidValue;
  emulation::set_limit(kernel, value);
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return attribute_call();
}
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const int limit = emulation::limit_of(reinterpret_cast<const void*>(kernel));
  if (config->dynamicSmemBytes > static_cast<size_t>(max(limit, kDefaultSharedBytes))) return cudaErrorInvalidValue;
  emulation::run_grid(config->gridDim.x, static_cast<int>(config->blockDim.x), config->dynamicSmemBytes,
                      [&] { kernel(arguments...); });
  return cudaSuccess;
}
