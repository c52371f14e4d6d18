#include "experts/few_rows/packed_launch.cuh"
#include "experts/few_rows/up.cuh"

namespace anabranch::cuda::few_rows {

ab_status launch_gemm(const PackedUp& up, cudaStream_t stream) {
  return launch_packed_product("up GEMM", up.x.dtype, packed_product(product_of(up), up.packed, 0), WriteUp{up},
                               stream);
}

}  // namespace anabranch::cuda::few_rows
