// GEMMs over rows as small-M GEMMs: their units and their epilogue.
#pragma once

#include "core/floats.h"
#include "experts/few_rows/product.cuh"
#include "experts/few_rows/products.h"

namespace anabranch::cuda::few_rows {

// Stores an element of y. sum: x W[expert] at `column`. slot -1: the row is padding.
struct WriteRows {
  RowsProduct p;
  __device__ __forceinline__ void operator()(int32_t expert, int64_t row, int64_t column, int32_t slot, float sum,
                                             float /*sum_up*/) const {
    float value = 0.0f;
    if (slot >= 0) {
      const float weight = p.weights[slot];
      value = p.factor * (p.weight_early ? sum : weight * sum);
      if (p.bias != nullptr) {
        value += weight * Floats(const_cast<void*>(p.bias), p.dtype)[expert * p.stored_columns() + column];
      }
    }
    Floats(p.y, p.dtype).set(row * p.N + column, value);
  }
};

inline Product product_of(const RowsProduct& p) {
  Product product;
  product.main = {.x = p.x,
                  .gathers = p.gathers_x && p.map.by_slot,
                  .w = p.w,
                  .matrix = p.shared_w ? 0 : p.D * p.stored_columns(),
                  .k = static_cast<int32_t>(p.D)};
  product.low_rank = operands_of(p.low_rank, p.stored_columns());
  product.map = p.map;
  product.groups = groups_of(p.group_sizes, p.E, p.R, p.range);
  product.columns.columns = static_cast<int32_t>(p.N);
  product.skips_rest = p.skips_rest;
  return product;
}

}  // namespace anabranch::cuda::few_rows
