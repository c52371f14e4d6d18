#include "experts/hopper/rows_product.cuh"

namespace anabranch::cuda {

ab_status multiply_rows_finished(const RowsProduct& product, TileChoice tile, int multiprocessors,
                                 cudaStream_t stream) {
  return launch_rows<Major::mn, FinishedRowsOut>(product, tile, multiprocessors, stream);
}

}  // namespace anabranch::cuda
