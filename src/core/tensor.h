// Checks of tensor views. One error style: "argument: got X, expected Y".
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "anabranch/types.h"
#include "core/status.h"

namespace anabranch {

// A set of dtypes, one bit per dtype.
using Dtypes = uint32_t;
constexpr Dtypes dtype_bit(ab_dtype dtype) { return 1u << dtype; }
constexpr Dtypes kFloat32 = dtype_bit(AB_FLOAT32);
constexpr Dtypes kFloats = dtype_bit(AB_FLOAT32) | dtype_bit(AB_BFLOAT16) | dtype_bit(AB_FLOAT16);
constexpr Dtypes kE4m3 = dtype_bit(AB_FLOAT8_E4M3);  // not in kFloats: without scales its range is too small
constexpr Dtypes kPacked = kE4m3 | dtype_bit(AB_FLOAT4_E2M1X2);
constexpr Dtypes kE8m0 = dtype_bit(AB_FLOAT8_E8M0) | dtype_bit(AB_UINT8);
constexpr Dtypes kInt32 = dtype_bit(AB_INT32);
constexpr Dtypes kIndices = dtype_bit(AB_INT16) | dtype_bit(AB_INT32) | dtype_bit(AB_INT64);
constexpr Dtypes kBool = dtype_bit(AB_BOOL);
constexpr Dtypes kAnyDtype = dtype_bit(AB_BOOL) | dtype_bit(AB_UINT8) | kIndices | kFloats;

// Bytes per element; 1 for AB_FLOAT4_E2M1X2, whose elements have half a byte.
int64_t dtype_size(int32_t dtype);

// An axis with its name in the documentation. size -1: any size.
struct Axis {
  const char* name;
  int64_t size = -1;
};

// More than any memory holds. Sums of sizes below it, and multiples by small factors, do not overflow.
constexpr int64_t kMaxBytes = int64_t{1} << 56;

// The tensor must have one of the dtypes and the shape, be contiguous, and have memory unless it is empty;
// check_optional() also accepts NULL. The product of its axes, counting an axis of size 0 as size 1, must be at most
// kMaxBytes, so that a product of axes of one tensor always fits int64, even if the tensor is empty.
ab_status check_tensor(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape);
ab_status check_optional(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape);

// check_tensor() for a tensor that is read through its strides. They may have any values with which offsets of elements
// do not overflow.
ab_status check_strided(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape);

// The stride of an axis in elements; row-major if the tensor has no strides.
int64_t stride_of(const ab_tensor& tensor, int32_t axis);

// Whether the tensor is row-major without gaps.
bool is_contiguous(const ab_tensor& tensor);

// The axes of a tensor in memory order, outermost first, without gaps.
struct Order {
  uint8_t axes[AB_MAX_RANK];
};

// check_tensor() for a tensor that may have any of several orders; *match is the index of the first one
// that fits. An axis of size 1 fits anywhere.
ab_status check_ordered(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape,
                        std::span<const Order> orders, size_t* match);

// Checks the workspace in exec against the required size.
ab_status check_workspace(const ab_exec* exec, size_t needed);

// Writes the required size to *bytes, for a workspace query.
ab_status report_workspace(size_t needed, size_t* bytes);

template <class T>
T* data(const ab_tensor* tensor) {
  return tensor == nullptr ? nullptr : static_cast<T*>(tensor->data);
}

}  // namespace anabranch
