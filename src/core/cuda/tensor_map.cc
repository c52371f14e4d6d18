#include "core/cuda/tensor_map.h"

#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "core/status.h"
#include "core/tensor.h"

namespace anabranch::cuda {
namespace {

constexpr int64_t kAlignment = 16;  // of addresses and strides, in bytes

// Returns a function of the driver, or nullptr if no driver provides it. The cache holds functions but no failures: a
// later call may succeed.
template <class Function>
Function find(const char* name, unsigned since, std::atomic<Function>& cached) {
  if (const Function function = cached.load(std::memory_order_relaxed); function != nullptr) return function;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t failure = cudaGetDriverEntryPointByVersion(name, &function, since, cudaEnableDefault, &result);
  if (failure != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // clear it
    return nullptr;
  }
  cached.store(reinterpret_cast<Function>(function), std::memory_order_relaxed);
  return reinterpret_cast<Function>(function);
}

std::atomic<decltype(&cuTensorMapEncodeTiled)> cached_encode{nullptr};
std::atomic<decltype(&cuCtxGetCurrent)> cached_current{nullptr};

// Makes the runtime's context current if this thread has no context, which is the case before its first call of most
// runtime functions. These calls are permitted during the capture of a graph.
void make_context_current() {
  constexpr unsigned kSinceVersion = 4000;  // CUDA 4.0
  const auto current = find("cuCtxGetCurrent", kSinceVersion, cached_current);
  CUcontext context = nullptr;
  if (current == nullptr || current(&context) != CUDA_SUCCESS || context != nullptr) return;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) cudaGetLastError();  // clear it
}

CUtensorMapDataType map_type(int32_t dtype) {
  switch (dtype) {
    case AB_BFLOAT16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case AB_FLOAT16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

// Sizes are listed from the innermost dimension; strides in bytes, from the second.
template <size_t kRank>
ab_status encode(const char* name, const void* data, int32_t dtype, const std::array<cuuint64_t, kRank>& sizes,
                 const std::array<cuuint64_t, kRank - 1>& strides, const std::array<cuuint32_t, kRank>& box,
                 CUtensorMap* map) {
  constexpr unsigned kSinceVersion = 12000;  // CUDA 12.0
  const auto function = find("cuTensorMapEncodeTiled", kSinceVersion, cached_encode);
  if (function == nullptr) return error(AB_UNSUPPORTED, "%s: the driver has no cuTensorMapEncodeTiled", name);
  std::array<cuuint32_t, kRank> steps;
  steps.fill(1);
  make_context_current();
  const CUresult failure = function(map, map_type(dtype), kRank, const_cast<void*>(data), sizes.data(), strides.data(),
                                    box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (failure == CUDA_SUCCESS) return ok();
  return error(AB_INTERNAL, "%s: cuTensorMapEncodeTiled failed with %d", name, static_cast<int>(failure));
}

cuuint64_t row_bytes(int64_t columns, int32_t dtype) { return static_cast<cuuint64_t>(columns * dtype_size(dtype)); }

}  // namespace

bool fits_tensor_map(const void* data, int32_t dtype, int64_t columns) {
  return columns > 0 && reinterpret_cast<uintptr_t>(data) % kAlignment == 0 &&
         columns * dtype_size(dtype) % kAlignment == 0;
}

// Element (column, row) of the range that ends before row `end` has coordinates (column, 2^30 - (end - row), end,
// 2^30): the second dimension, of size 2^30, ends where the range ends. With S bytes per row the address is S (2^30 -
// (end - row)) + S end + (2^34 - S) 2^30 = S row + 2^64, and addresses wrap around at 2^64. NVIDIA does not document
// this wrap-around. Triton's ragged descriptors (triton/tools/ragged_tma.py) also rely on it, and tests read and write
// through such maps.
ab_status make_row_window_map(const char* name, const void* data, int32_t dtype, int64_t columns, int box_columns,
                              int box_rows, CUtensorMap* map, int64_t elements) {
  constexpr cuuint64_t kAnySize = 0x7fff0000;  // nearly the largest coordinate: `end` and 2^30 are always in range
  const cuuint64_t stride = row_bytes(elements > 0 ? elements : columns, dtype);
  return encode<4>(name, data, dtype,
                   {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(kMaxWindowRows), kAnySize, kAnySize},
                   {stride, stride, (cuuint64_t{1} << 34) - stride},
                   {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1, 1}, map);
}

ab_status make_matrices_map(const char* name, const void* data, int32_t dtype, int64_t matrices, int64_t rows,
                            int64_t columns, int box_columns, int box_rows, CUtensorMap* map, int64_t elements,
                            int64_t matrix_rows) {
  const cuuint64_t stride = row_bytes(elements > 0 ? elements : columns, dtype);
  return encode<3>(name, data, dtype,
                   {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(matrices)},
                   {stride, stride * static_cast<cuuint64_t>(matrix_rows > 0 ? matrix_rows : rows)},
                   {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1}, map);
}

// Dimensions from the innermost: column, b, q over all boxes, j, matrix.
ab_status make_shuffled_matrices_map(const char* name, const void* data, int32_t dtype, int64_t matrices, int64_t rows,
                                     int64_t columns, int box_columns, CUtensorMap* map) {
  const cuuint64_t stride = row_bytes(columns, dtype);
  return encode<5>(
      name, data, dtype,
      {static_cast<cuuint64_t>(columns), 2, static_cast<cuuint64_t>(rows / 8), 4, static_cast<cuuint64_t>(matrices)},
      {stride, stride * 8, stride * 2, stride * static_cast<cuuint64_t>(rows)},
      {static_cast<cuuint32_t>(box_columns), 2, 4, 4, 1}, map);
}

}  // namespace anabranch::cuda
