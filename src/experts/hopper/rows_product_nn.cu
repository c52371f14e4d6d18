#include "experts/hopper/rows_product.cuh"

namespace anabranch::cuda {

ab_status multiply_rows_nn(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  return launch_rows<Major::mn, RowsOut>(product, tile, multiprocessors, stream);
}

}  // namespace anabranch::cuda
