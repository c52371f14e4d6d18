// What becomes of an element of a product over rows, for kernels that write single ones.
#pragma once

#include "core/floats.h"
#include "experts/cuda/ops/rows_product.h"

namespace anabranch::cuda {

// sum: x W[expert] at a column. slot -1: of padding.
__device__ __forceinline__ void write_rows_element(const RowsProduct& p, int32_t expert, int64_t row, int64_t column,
                                                   int32_t slot, float sum) {
  float value = 0.0f;
  if (slot >= 0) {
    const float weight = p.weights[slot];
    value = p.weight_early ? sum : weight * sum;
    if (p.bias != nullptr) {
      value += weight * Floats(const_cast<void*>(p.bias), p.dtype)[expert * p.stored_columns() + column];
    }
  }
  Floats(p.y, p.dtype).set(row * p.N + column, value);
}

}  // namespace anabranch::cuda
