#include "experts/down.h"

#include "experts/products.h"
#include "experts/simple_product.cuh"

namespace anabranch::cuda {
namespace {

struct Weight {
  static constexpr int kParts = 1;
  Down down;

  __device__ __forceinline__ void operator()(const Tile& tile, const simple::Results<kParts>& results) const {
#pragma unroll
    for (int i = 0; i < simple::kEach; ++i) {
      if (i >= results.rows) continue;
      const int32_t row = results.row + i;
      const int32_t slot = tile.expert == kNoExpert ? -1 : down.map.slot_of(row);
      const float weight = slot < 0 ? 0.0f : down.weights[slot];
#pragma unroll
      for (int j = 0; j < simple::kEach; ++j) {
        if (j >= results.columns) continue;
        const int32_t column = results.column + j;
        const float product = results.sums[0][i][j];
        const float y = (down.weight_early ? product : weight * product) + bias(weight, tile.expert, column);
        down.y.set(row * down.s.D + column, slot < 0 ? 0.0f : y);
      }
    }
  }

  __device__ float bias(float weight, int64_t expert, int32_t column) const {
    return expert < 0 || down.b_out.data == nullptr ? 0.0f : weight * down.b_out[expert * down.s.D + column];
  }
};

}  // namespace

ab_status compute_down(const Down& down, int multiprocessors, cudaStream_t stream) {
  const FfnSizes& s = down.s;
  if (s.R * s.D == 0) return ok();
  RowsProduct fast{.x = down.a.data,
                   .w = down.w_out.data,
                   .group_sizes = down.group_sizes,
                   .y = down.y.data,
                   .dtype = down.y.dtype,
                   .R = s.R,
                   .E = s.E,
                   .K = s.F,
                   .N = s.D};
  const bool weighted = down.weights.data != nullptr && !down.weight_early;
  if (down.b_out.data == nullptr && !weighted) return compute_rows(fast, down.map, multiprocessors, stream);
  fast.bias = down.b_out.data;
  fast.weights = down.map.weights_of(down.weights);
  fast.scales = weighted;
  if (runs_on_tensor_cores(fast)) return multiply_rows(fast, multiprocessors, stream);
  SimpleProduct product;
  product.a = {down.a.data, down.a.dtype, 0, s.F, 1};
  product.b = {down.w_out.data, down.w_out.dtype, s.F * s.D, s.D, 1};
  product.group_sizes = down.group_sizes;
  product.R = s.R;
  product.E = s.E;
  product.rows = s.R;
  product.columns = s.D;
  product.terms = s.F;
  return simple::multiply_rows(product, Weight{down}, multiprocessors, stream);
}

}  // namespace anabranch::cuda
