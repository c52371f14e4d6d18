#include "experts/hopper/rows_product.cuh"

namespace anabranch::cuda {

ab_status multiply_rows_nt(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  return launch_rows<Major::k, RowsOut>(product, tile, multiprocessors, stream);
}

}  // namespace anabranch::cuda
