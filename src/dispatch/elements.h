// Single elements of float tensors and rows of any tensor.
#pragma once

#include "core/dtype.h"
#include "core/inline.h"
#include "core/tensor.h"

namespace anabranch {

// The elements of a tensor of floats, one by one, in float32; ones without a tensor.
struct Floats {
  void* data = nullptr;
  int32_t dtype = 0;

  Floats() = default;
  explicit Floats(const ab_tensor* tensor) {
    if (tensor == nullptr) return;
    data = tensor->data;
    dtype = tensor->dtype;
  }
  AB_INLINE float operator[](int64_t i) const {
    if (data == nullptr) return 1.0f;
    return with_float_type(dtype, [&]<class T>(T) { return to_float(static_cast<const T*>(data)[i]); });
  }
  AB_INLINE void set(int64_t i, float value) const {
    with_float_type(dtype, [&]<class T>(T) { static_cast<T*>(data)[i] = from_float<T>(value); });
  }
};

// Rows of a tensor [any, D].
struct Rows {
  char* data = nullptr;
  int32_t dtype = 0;
  int64_t D = 0;
  int64_t bytes = 0;  // of one row

  Rows() = default;
  explicit Rows(const ab_tensor* tensor) {
    if (tensor == nullptr) return;
    data = static_cast<char*>(tensor->data);
    dtype = tensor->dtype;
    D = tensor->shape[1];
    bytes = D * dtype_size(dtype);
  }
  AB_INLINE char* operator[](int64_t row) const { return data + row * bytes; }
};

}  // namespace anabranch
