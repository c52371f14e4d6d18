// Which kernels the phases of float8_e4m3fn run on: Hopper's, there are no others.
#include "experts/cuda/fp8.h"

#include "experts/cuda/clear_padding.h"
#include "experts/cuda/path.h"
#include "experts/hopper/launchers.h"

namespace anabranch::cuda {
namespace {

ab_status check_fp8_path(const Device& device, int32_t dtype) {
  const PathChoice choice = first_path(device);
  if (choice.path != Path::hopper) {
    return error(AB_UNSUPPORTED, "precision: got AB_PRECISION_FP8, expected another one: %s", choice.why_not_hopper);
  }
  if (dtype == AB_BFLOAT16 || dtype == AB_FLOAT16) return ok();
  return error(AB_UNSUPPORTED,
               "precision: got AB_PRECISION_FP8, expected another one on a GPU where rows are float32, or rows of 16 bits");
}

}  // namespace

ab_status compute_up(const Fp8Up& up, const Device& device, cudaStream_t stream) {
  if (up.s.R * up.s.F == 0) return ok();
  AB_RETURN_IF_ERROR(check_fp8_path(device, up.x.dtype));
  switch (hopper::hidden_columns_of(up.s)) {
    case hopper::HiddenColumns::plain:
      return hopper::launch_fp8_up<hopper::HiddenColumns::plain>(up, device.multiprocessors, stream);
    case hopper::HiddenColumns::gated:
      return hopper::launch_fp8_up<hopper::HiddenColumns::gated>(up, device.multiprocessors, stream);
    case hopper::HiddenColumns::interleaved: break;
  }
  return error(AB_UNSUPPORTED,
               "w_in: got gate and up interleaved, expected them side by side with AB_PRECISION_FP8 on a GPU");
}

ab_status compute_rows_product(const Fp8RowsProduct& p, const Device& device, cudaStream_t stream) {
  if (p.R * p.N == 0) return ok();
  AB_RETURN_IF_ERROR(check_fp8_path(device, p.dtype));
  // A bias is added by the epilogue that knows weights.
  if (p.weights.data != nullptr || p.bias != nullptr) {
    return hopper::launch_fp8_rows_product<hopper::ScaleBiasEpilogue>(p, device.multiprocessors, stream);
  }
  AB_RETURN_IF_ERROR(hopper::launch_fp8_rows_product<hopper::RowsEpilogue>(p, device.multiprocessors, stream));
  if (p.skips_rest) return ok();
  return clear_padding(p.map, {p.y, p.dtype}, p.R, p.N, device.multiprocessors, stream);
}

ab_status compute_hidden_gradient(const Fp8HiddenGradient& g, const Device& device, cudaStream_t stream) {
  if (g.s.R * g.s.F == 0) return ok();
  AB_RETURN_IF_ERROR(check_fp8_path(device, g.h.dtype));
  switch (hopper::hidden_columns_of(g.s)) {
    case hopper::HiddenColumns::plain:
      return hopper::launch_fp8_hidden_gradient<hopper::HiddenColumns::plain>(g, device.multiprocessors, stream);
    case hopper::HiddenColumns::gated:
      return hopper::launch_fp8_hidden_gradient<hopper::HiddenColumns::gated>(g, device.multiprocessors, stream);
    case hopper::HiddenColumns::interleaved: break;
  }
  return hopper::launch_fp8_hidden_gradient<hopper::HiddenColumns::interleaved>(g, device.multiprocessors, stream);
}

}  // namespace anabranch::cuda
