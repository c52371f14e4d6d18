#include "experts/hopper/rows_product.cuh"

namespace anabranch::cuda {

bool runs_on_tensor_cores(const RowsProduct& p) {
  constexpr int64_t kMostIndices = int64_t{1} << 30;  // of terms and columns with a tile more, of rows
  static_assert(kMostIndices <= kMostWindowRows);
  const int64_t w_row = p.transposed ? p.K : p.stored_columns();
  const bool counts = p.R > 0 && p.E > 0 && p.K > 0 && p.N > 0 && p.R <= kMostIndices && p.K <= kMostIndices &&
                      p.N <= kMostIndices && p.E <= kMostIndices &&
                      most_row_tiles(p.R, p.E, 128) * ((p.N + 127) / 128) <= kMostIndices;
  return counts && (p.dtype == AB_BFLOAT16 || p.dtype == AB_FLOAT16) && fits_tensor_map(p.x, p.dtype, p.K) &&
         fits_tensor_map(p.w, p.dtype, w_row) && fits_tensor_map(p.y, p.dtype, p.N) &&
         fits_tensor_map(p.y, p.dtype, p.stored_columns()) &&  // a window goes the way of the whole
         (p.bias == nullptr || fits_tensor_map(p.bias, p.dtype, p.N)) && !(p.transposed && needs_finish(p));
}

ab_status multiply_rows(const RowsProduct& p, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  const auto multiply = p.transposed ? multiply_rows_nt : needs_finish(p) ? multiply_rows_finished : multiply_rows_nn;
  return multiply(p, tile, multiprocessors, stream);
}

ab_status multiply_rows(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  const auto choose = needs_finish(p) ? choose_fused_tile : choose_row_tile;
  return multiply_rows(p, choose(p.R, p.E, p.N, p.K, multiprocessors).choice, multiprocessors, stream);
}

}  // namespace anabranch::cuda
