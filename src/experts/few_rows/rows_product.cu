#include "experts/cuda/ops/rows_element.cuh"
#include "experts/few_rows/product.cuh"
#include "experts/few_rows/products.h"

namespace anabranch::cuda::few_rows {
namespace {

struct WriteRows {
  RowsProduct product;
  __device__ __forceinline__ void operator()(int32_t expert, int64_t row, int64_t column, int32_t slot, float sum,
                                             float /*other*/) const {
    write_rows_element(product, expert, row, column, slot, sum);
  }
};

}  // namespace

ab_status multiply(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  Product product;
  product.x = p.x;
  product.map = p.map;
  product.groups = groups_of(p.group_sizes, p.E, p.R);
  product.w = p.w;
  product.matrix = p.D * p.stored_columns();
  product.columns.columns = static_cast<int32_t>(p.N);
  product.k = static_cast<int32_t>(p.D);
  product.skips_rest = p.skips_rest;
  return launch_product("grouped product", p.dtype, product, WriteRows{p}, multiprocessors, stream);
}

}  // namespace anabranch::cuda::few_rows
