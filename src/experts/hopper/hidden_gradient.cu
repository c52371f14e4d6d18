#include "experts/hopper/hidden_gradient.cuh"

namespace anabranch::cuda {

bool runs_on_tensor_cores(const HiddenGradient& g) {
  constexpr int64_t kMostIndices = int64_t{1} << 30;  // of terms and columns with a tile more, of rows
  static_assert(kMostIndices <= kMostWindowRows);
  const auto counts = [](int64_t size) { return size > 0 && size <= kMostIndices; };
  const auto fits = [&](const void* data) { return data == nullptr || fits_tensor_map(data, g.dtype, g.F); };
  return (g.dtype == AB_BFLOAT16 || g.dtype == AB_FLOAT16) && counts(g.R) && counts(g.E) && counts(g.D) &&
         counts(g.P * g.F) && most_row_tiles(g.R, g.E, 128) * ceil_div(g.F, 128) <= kMostIndices &&
         fits_operand(g.d_y, g.dtype, g.D) && fits_tensor_map(g.w_out, g.dtype, g.D) && fits(g.h) && fits(g.dh) &&
         fits(g.weighted_a);
}

TileChoice tile_of(const HiddenGradient& g, int multiprocessors) {
  return choose_fused_tile(g.R, g.E, g.F, g.D, multiprocessors).choice;
}

int64_t parts_of_dots(const HiddenGradient& g, TileChoice tile) {
  return ceil_div(g.F, tile == TileChoice::k128x256 ? Tile128x256::kColumns : Tile128x128::kColumns);
}

ab_status multiply_hidden(const HiddenGradient& g, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  return g.P == 2 ? multiply_hidden_gated(g, tile, multiprocessors, stream)
                  : multiply_hidden_ungated(g, tile, multiprocessors, stream);
}

}  // namespace anabranch::cuda
