#include "torch/blas.h"

#include <dlfcn.h>

#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>

#include "anabranch/types.h"

namespace anabranch::torch {

namespace {

// cuBLAS' declarations, as far as they are needed. Its header is not.
using BlasHandle = void*;
using BlasStatus = int;  // 0: success
constexpr int kOpN = 0, kOpT = 1;
constexpr int kFloat32 = 0, kBFloat16 = 14;  // cudaDataType
constexpr int kComputeFloat32 = 68;
constexpr int kAlgorithm = 99;  // the only one on GPUs with tensor cores
// What torch gives to cuBLAS on Hopper. The size affects the choice of kernels, so another one may change bits.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

struct Blas {
  BlasStatus (*create)(BlasHandle*);
  BlasStatus (*set_stream)(BlasHandle, void*);
  BlasStatus (*set_workspace)(BlasHandle, void*, size_t);
  BlasStatus (*gemm)(BlasHandle, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                     const void*, void*, int, int, int, int);
};

std::optional<Blas> blas;

void check_blas(BlasStatus status, const char* action) {
  if (status != 0) {
    fail(AB_INTERNAL, std::string("cuBLAS failed to ") + action + ": status " + std::to_string(status));
  }
}

// One handle per device. A handle has state, so one thread at a time uses it.
struct DeviceBlas {
  std::mutex mutex;
  BlasHandle handle = nullptr;
};

DeviceBlas& blas_of(int32_t device) {
  static std::mutex mutex;
  static auto* devices = new std::unordered_map<int32_t, DeviceBlas>;  // never destroyed: the driver may end first
  std::lock_guard lock(mutex);
  return (*devices)[device];
}

// An operand as cuBLAS sees it: the transpose of a row-major matrix.
struct Operand {
  int operation;
  int leading;
};

std::optional<Operand> operand_of(const Tensor& matrix) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  int64_t* strides;
  check(shims.get_strides(matrix.get(), &strides), "return strides");
  const int64_t rows = matrix.sizes()[0], columns = matrix.sizes()[1];
  if (rows == 0 || columns == 0 || rows > kMax || columns > kMax) return {};
  const bool in_rows = strides[1] == 1 && strides[0] >= columns;
  const bool in_columns = strides[0] == 1 && strides[1] >= rows;
  if (!in_rows && !in_columns) return {};
  const int64_t leading = in_rows ? strides[0] : strides[1];
  if (leading > kMax) return {};
  return Operand{in_rows ? kOpN : kOpT, static_cast<int>(leading)};
}

}  // namespace

void find_blas(void* cuda) {
  Blas found;
  const auto find = [cuda](const char* symbol, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(cuda, symbol));
    return function != nullptr;
  };
  if (find("cublasCreate_v2", found.create) && find("cublasSetStream_v2", found.set_stream) &&
      find("cublasSetWorkspace_v2", found.set_workspace) && find("cublasGemmEx", found.gemm)) {
    blas = found;
  }
}

Tensor multiply(const Tensor& a, const Tensor& b, int32_t dtype) {
  const std::optional<Operand> left = operand_of(a), right = operand_of(b);
  const int32_t bfloat16 = shims.dtype_bfloat16();
  // torch has settings for products of float32 matrices.
  if (!blas || !left || !right || a.dtype() != bfloat16 || b.dtype() != bfloat16) return matmul(a, b, dtype);
  const int32_t device = a.device_index();
  const int64_t shape[] = {a.sizes()[0], b.sizes()[1]};
  Tensor result = empty(2, shape, dtype, a.device_type(), device);
  const Tensor workspace = empty(1, &kWorkspaceBytes, shims.dtype_uint8(), a.device_type(), device);
  void* stream;
  check(shims.get_stream(device, &stream), "return its stream");
  const float one = 1.0f, zero = 0.0f;
  const auto rows = static_cast<int>(shape[0]), columns = static_cast<int>(shape[1]);
  DeviceBlas& of_device = blas_of(device);
  std::lock_guard lock(of_device.mutex);
  const DeviceGuard guard(a.device_type(), device);
  if (of_device.handle == nullptr) check_blas(blas->create(&of_device.handle), "start");
  check_blas(blas->set_stream(of_device.handle, stream), "set its stream");
  check_blas(blas->set_workspace(of_device.handle, workspace.data(), kWorkspaceBytes), "set its workspace");
  check_blas(
      blas->gemm(of_device.handle, right->operation, left->operation, columns, rows, static_cast<int>(a.sizes()[1]),
                 &one, b.data(), kBFloat16, right->leading, a.data(), kBFloat16, left->leading, &zero, result.data(),
                 dtype == bfloat16 ? kBFloat16 : kFloat32, columns, kComputeFloat32, kAlgorithm),
      "multiply matrices");
  return result;
}

}  // namespace anabranch::torch
