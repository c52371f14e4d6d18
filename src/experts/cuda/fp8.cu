// The phases of float8_e4m3fn: on Hopper's kernels, there are no others.
#include "experts/cuda/clear_padding.h"
#include "experts/cuda/path.h"
#include "experts/cuda/phases.h"
#include "experts/hopper/fp8_products.h"

namespace anabranch::cuda {
namespace {

template <class Operation>
ab_status check_fp8(const Operation& operation, const Device& device) {
  const PathChoice choice = first_path(device);
  const bool first = choice.path == Path::hopper;
  const char* why_not = first ? hopper::why_not(operation) : choice.why_not_hopper;
  if (first && why_not == nullptr) return ok();
  return error(AB_UNSUPPORTED,
               "precision: got AB_PRECISION_FP8, expected another one, since Hopper's kernels can't: %s",
               why_not == nullptr ? "ANABRANCH_CUDA_PATH names others" : why_not);
}

}  // namespace

int64_t dot_parts(const Fp8HiddenGradient& gradient) { return hopper::parts_of_dots(gradient); }

ab_status compute_up(const Fp8Up& up, const Device& device, cudaStream_t stream) {
  if (up.s.R * up.s.F == 0) return ok();
  AB_RETURN_IF_ERROR(check_fp8(up, device));
  return hopper::multiply(up, device.multiprocessors, stream);
}

ab_status compute_hidden_gradient(const Fp8HiddenGradient& gradient, const Device& device, cudaStream_t stream) {
  if (gradient.s.R * gradient.s.F == 0) return ok();
  AB_RETURN_IF_ERROR(check_fp8(gradient, device));
  return hopper::multiply(gradient, device.multiprocessors, stream);
}

ab_status compute_rows_product(const Fp8RowsProduct& product, const Device& device, cudaStream_t stream) {
  if (product.R * product.N == 0) return ok();
  // Of nothing there is nothing to quantise.
  if (product.D == 0) return compute_rows_product(static_cast<const RowsProduct&>(product), device, stream);
  AB_RETURN_IF_ERROR(check_fp8(product, device));
  AB_RETURN_IF_ERROR(hopper::multiply(product, device.multiprocessors, stream));
  const bool clears = product.weights.data != nullptr || product.bias != nullptr;  // padding, as it goes
  if (clears || product.skips_rest) return ok();
  return clear_padding(product.map, {product.y, product.dtype}, product.R, product.N, device.multiprocessors, stream);
}

}  // namespace anabranch::cuda
