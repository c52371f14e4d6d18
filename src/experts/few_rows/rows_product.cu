#include "experts/few_rows/rows_product.cuh"

namespace anabranch::cuda::few_rows {

ab_status launch_gemm(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  return launch_product("grouped GEMM", p.dtype, product_of(p), WriteRows{p}, multiprocessors, stream);
}

}  // namespace anabranch::cuda::few_rows
