#include "experts/hopper/up.cuh"

namespace anabranch::cuda {

bool runs_on_tensor_cores(const UpProduct& p) { return fits_tensor_cores(p, p.x, {p.w_in, p.b_in, p.h, p.a}); }

ab_status multiply_up(const UpProduct& p, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  return p.P == 2 ? multiply_up_gated(p, tile, multiprocessors, stream)
                  : multiply_up_ungated(p, tile, multiprocessors, stream);
}

ab_status multiply_up(const UpProduct& p, int multiprocessors, cudaStream_t stream) {
  return multiply_up(p, choose_fused_tile(p.R, p.E, p.P * p.F, p.D, multiprocessors).choice, multiprocessors, stream);
}

}  // namespace anabranch::cuda
