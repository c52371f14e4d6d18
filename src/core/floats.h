// Single elements of float tensors.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/inline.h"
#include "core/tensor.h"

namespace anabranch {

// Reads the elements of a float tensor as float32. Without a tensor every element is 1.
struct Floats {
  void* data = nullptr;
  int32_t dtype = 0;

  Floats() = default;
  AB_INLINE Floats(void* elements, int32_t element_dtype) : data(elements), dtype(element_dtype) {}
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

}  // namespace anabranch
