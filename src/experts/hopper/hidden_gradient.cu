#include "experts/hopper/hidden_gradient.cuh"

namespace anabranch::cuda {

bool runs_on_tensor_cores(const HiddenGradient& g) {
  return fits_tensor_cores(g, g.d_y, {g.h, g.dh, g.weighted_a}) && fits_tensor_map(g.w_out, g.dtype, g.D);
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
