#include "experts/few_rows/up.cuh"

namespace anabranch::cuda::few_rows {

ab_status launch_gemm(const Up& up, int multiprocessors, cudaStream_t stream) {
  return launch_product("up GEMM", up.x.dtype, product_of(up), WriteUp{up}, multiprocessors, stream);
}

}  // namespace anabranch::cuda::few_rows
