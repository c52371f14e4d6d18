// Checks of tensor views. One error style: "argument: got X, expected Y".
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "anabranch/types.h"
#include "core/status.h"

namespace anabranch {

// A set of dtypes, as bits.
using Dtypes = uint32_t;
constexpr Dtypes dtype_bit(ab_dtype dtype) { return 1u << dtype; }
constexpr Dtypes kFloat32 = dtype_bit(AB_FLOAT32);
constexpr Dtypes kFloats = dtype_bit(AB_FLOAT32) | dtype_bit(AB_BFLOAT16) | dtype_bit(AB_FLOAT16);
constexpr Dtypes kE4m3 = dtype_bit(AB_FLOAT8_E4M3);  // not one of kFloats: it has no range without scales
constexpr Dtypes kInt32 = dtype_bit(AB_INT32);
constexpr Dtypes kIndices = dtype_bit(AB_INT16) | dtype_bit(AB_INT32) | dtype_bit(AB_INT64);
constexpr Dtypes kBool = dtype_bit(AB_BOOL);
constexpr Dtypes kAnyDtype = dtype_bit(AB_BOOL) | dtype_bit(AB_UINT8) | kIndices | kFloats;

int64_t dtype_size(int32_t dtype);

// An axis as the documentation names it; size -1: any.
struct Axis {
  const char* name;
  int64_t size = -1;
};

// More than any memory holds. Sizes below it can be added up and multiplied by small numbers without a thought.
constexpr int64_t kMostBytes = int64_t{1} << 56;

// Present or not, an optional tensor must have one of the dtypes and the shape, be contiguous and have memory. Its axes
// are such that their product, an axis of no element counted as 1, makes at most kMostBytes: so a product of axes of
// one tensor always fits int64, also of a tensor that needs no memory.
ab_status check_tensor(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape);
ab_status check_optional(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape);

// The axes of a tensor as they stand in memory, without gaps, the outermost first.
struct Order {
  uint8_t axes[AB_MAX_RANK];
};

// check_tensor() of one that may lie in any of some orders, *found being the first that fits: axes of one element stand
// anywhere.
ab_status check_ordered(const char* name, const ab_tensor* tensor, Dtypes dtypes, std::initializer_list<Axis> shape,
                        std::span<const Order> orders, size_t* found);

// The workspace that exec brings against what is needed.
ab_status check_workspace(const ab_exec* exec, size_t needed);

// Answers a query for what is needed.
ab_status report_workspace(size_t needed, size_t* bytes);

template <class T>
T* data(const ab_tensor* tensor) {
  return tensor == nullptr ? nullptr : static_cast<T*>(tensor->data);
}

}  // namespace anabranch
