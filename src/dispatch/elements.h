// Rows of a tensor of any dtype.
#pragma once

#include "core/floats.h"
#include "core/inline.h"
#include "core/tensor.h"

namespace anabranch {

// Rows of a tensor [any, D].
struct Rows {
  char* data = nullptr;
  int32_t dtype = 0;
  int64_t D = 0;
  int64_t bytes = 0;  // per row

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
