#include "experts/few_rows/packed_launch.cuh"
#include "experts/few_rows/rows_product.cuh"

namespace anabranch::cuda::few_rows {

ab_status launch_gemm(const PackedRowsProduct& p, cudaStream_t stream) {
  return launch_packed_product("grouped GEMM", p.dtype, packed_product(product_of(p), p.packed, p.first_column),
                               WriteRows{p}, stream);
}

}  // namespace anabranch::cuda::few_rows
