// Single elements of float tensors and rows of any tensor.
#pragma once

#include "core/dtype.h"
#include "core/tensor.h"

namespace anabranch {

// Element i of a tensor of floats; 1 without a tensor.
inline float element(const ab_tensor* tensor, int64_t i) {
  if (tensor == nullptr) return 1.0f;
  return with_float_type(tensor->dtype, [&]<class T>(T) { return to_float(data<const T>(tensor)[i]); });
}

inline void set_element(const ab_tensor* tensor, int64_t i, float value) {
  with_float_type(tensor->dtype, [&]<class T>(T) { data<T>(tensor)[i] = from_float<T>(value); });
}

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
  char* operator[](int64_t row) const { return data + row * bytes; }
};

}  // namespace anabranch
