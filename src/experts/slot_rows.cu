#include "experts/slot_rows.h"

#include "experts/products.h"
#include "experts/simple_product.cuh"

namespace anabranch::cuda {
namespace {

struct Weight {
  static constexpr int kParts = 1;
  SlotRows rows;

  __device__ __forceinline__ void operator()(const Tile& tile, const simple::Results<kParts>& results) const {
    const RowsProduct& p = rows.product;
    const Floats y(p.y, p.dtype);
#pragma unroll
    for (int i = 0; i < simple::kEach; ++i) {
      if (i >= results.rows) continue;
      const int32_t row = results.row + i;
      const int32_t slot = tile.expert == kNoExpert ? -1 : rows.map.slot_of(row);
      const float weight = slot < 0 ? 0.0f : rows.weights[slot];
#pragma unroll
      for (int j = 0; j < simple::kEach; ++j) {
        if (j >= results.columns) continue;
        const int32_t column = results.column + j;
        const float product = results.sums[0][i][j];
        const float value = (rows.weight_early ? product : weight * product) + bias(weight, tile.expert, column);
        y.set(row * p.N + column, slot < 0 ? 0.0f : value);
      }
    }
  }

  __device__ float bias(float weight, int64_t expert, int32_t column) const {
    const RowsProduct& p = rows.product;
    if (expert < 0 || p.bias == nullptr) return 0.0f;
    return weight * Floats(const_cast<void*>(p.bias), p.dtype)[expert * p.stored_columns() + column];
  }
};

}  // namespace

ab_status compute_slot_rows(const SlotRows& rows, int multiprocessors, cudaStream_t stream) {
  RowsProduct product = rows.product;
  if (product.R * product.N == 0) return ok();
  const bool weighted = rows.weights.data != nullptr && !rows.weight_early;
  if (product.bias == nullptr && !weighted) {
    return product.skips_rest ? compute_rows(product, multiprocessors, stream)
                              : compute_rows(product, rows.map, multiprocessors, stream);
  }
  product.weights = rows.map.weights_of(rows.weights);
  product.scales = weighted;
  if (runs_on_tensor_cores(product)) return multiply_rows(product, multiprocessors, stream);
  return simple::multiply_rows(simple_product(product), Weight{rows}, multiprocessors, stream);
}

}  // namespace anabranch::cuda
