#include "experts/hopper/up.cuh"

namespace anabranch::cuda {

bool runs_on_tensor_cores(const UpProduct& p) {
  constexpr int64_t kMostIndices = int64_t{1} << 30;  // of terms and columns with a tile more, of rows
  static_assert(kMostIndices <= kMostWindowRows);
  const auto counts = [](int64_t size) { return size > 0 && size <= kMostIndices; };
  const auto fits = [&](const void* data) { return data == nullptr || fits_tensor_map(data, p.dtype, p.F); };
  return (p.dtype == AB_BFLOAT16 || p.dtype == AB_FLOAT16) && counts(p.R) && counts(p.E) && counts(p.D) &&
         counts(p.P * p.F) && most_row_tiles(p.R, p.E, 128) * ceil_div(p.F, 64) <= kMostIndices &&
         fits_operand(p.x, p.dtype, p.D) && fits(p.w_in) && fits(p.b_in) && fits(p.h) && fits(p.a);
}

ab_status multiply_up(const UpProduct& p, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  return p.P == 2 ? multiply_up_gated(p, tile, multiprocessors, stream)
                  : multiply_up_ungated(p, tile, multiprocessors, stream);
}

ab_status multiply_up(const UpProduct& p, int multiprocessors, cudaStream_t stream) {
  return multiply_up(p, choose_fused_tile(p.R, p.E, p.P * p.F, p.D, multiprocessors).choice, multiprocessors, stream);
}

}  // namespace anabranch::cuda
