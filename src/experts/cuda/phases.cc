#include "experts/cuda/phases.h"

#include "experts/cuda/clear_padding.h"
#include "experts/cuda/ops/workspace_sizes.h"
#include "experts/cuda/path.h"
#include "experts/cuda/sum_parts.h"
#include "experts/cuda/total_rows.h"
#include "experts/few_rows/products.h"
#include "experts/hopper/fp8_products.h"
#include "experts/hopper/packed_products.h"
#include "experts/portable/packed_products.h"

namespace anabranch::cuda {
namespace {

template <class Operation>
ab_status check_fp8(const Operation& operation, const Device& device) {
  const PathChoice choice = first_path(device);
  const bool first = choice.path == Path::hopper;
  const char* unsupported_reason = first ? hopper::unsupported_reason(operation) : choice.hopper_unsupported_reason;
  if (first && unsupported_reason == nullptr) return ok();
  return error(AB_UNSUPPORTED,
               "precision: got AB_PRECISION_FP8, expected another precision since Hopper's FP8 kernels cannot run: %s",
               unsupported_reason);
}

bool any_requested(const IntermediateGradient& g) {
  return g.dh.data != nullptr || g.weighted_a.data != nullptr || g.dots != nullptr;
}

}  // namespace

ab_status compute_up(const Up& up, const Device& device, cudaStream_t stream) {
  if (up.s.R * up.s.F == 0) return ok();
  const int multiprocessors = device.multiprocessors;
  if (few_rows::supports(up)) return few_rows::launch_gemm(up, multiprocessors, stream);
  if (choose_path(up, device).path == Path::portable) return portable::launch_gemm(up, multiprocessors, stream);
  return hopper::launch_gemm(up, hopper::choose_tile(up, multiprocessors), multiprocessors, stream);
}

ab_status compute_rows_product(const RowsProduct& p, const Device& device, cudaStream_t stream) {
  if (p.R * p.N == 0) return ok();
  const int multiprocessors = device.multiprocessors;
  if (few_rows::supports(p)) return few_rows::launch_gemm(p, multiprocessors, stream);
  if (choose_path(p, device).path == Path::portable) return portable::launch_gemm(p, multiprocessors, stream);
  AB_RETURN_IF_ERROR(hopper::launch_gemm(p, hopper::choose_tile(p, multiprocessors), multiprocessors, stream));
  // Without row weights, Hopper's epilogue adds the bias to padding rows and multiplies their zeros by expert weights
  // that may be NaN.
  if (p.scales() || p.weighs_bias() || p.thin || p.skips_rest) return ok();
  return clear_padding(p.map, {p.y, p.dtype}, p.R, p.N, multiprocessors, stream);
}

ab_status compute_packed(const PackedUp& up, PackedPath path, const Device& device, cudaStream_t stream) {
  const int multiprocessors = device.multiprocessors;
  if (path == PackedPath::few_rows) return few_rows::launch_gemm(up, stream);
  if (path == PackedPath::portable) return portable::launch_gemm(up, multiprocessors, stream);
  return hopper::launch_gemm(up, multiprocessors, stream);
}

ab_status compute_packed(const PackedRowsProduct& p, PackedPath path, const Device& device, cudaStream_t stream) {
  const int multiprocessors = device.multiprocessors;
  if (path == PackedPath::few_rows) return few_rows::launch_gemm(p, stream);
  if (path == PackedPath::portable) return portable::launch_gemm(p, multiprocessors, stream);
  AB_RETURN_IF_ERROR(hopper::launch_gemm(p, multiprocessors, stream));
  return p.skips_rest ? ok() : clear_padding(p.map, {p.y, p.dtype}, p.R, p.N, multiprocessors, stream);
}

ab_status compute_packed(const PackedIntermediateGradient& g, PackedPath path, const Device& device,
                         cudaStream_t stream) {
  if (!any_requested(g)) return ok();
  return path == PackedPath::portable ? portable::launch_gemm(g, device.multiprocessors, stream)
                                      : hopper::launch_gemm(g, device.multiprocessors, stream);
}

ab_status compute_intermediate_gradient(const IntermediateGradient& g, const Device& device, cudaStream_t stream) {
  if (!any_requested(g) || g.s.R * g.s.F == 0) return ok();
  const int multiprocessors = device.multiprocessors;
  if (choose_path(g, device).path == Path::portable) return portable::launch_gemm(g, multiprocessors, stream);
  return hopper::launch_gemm(g, hopper::choose_tile(g, multiprocessors), multiprocessors, stream);
}

int64_t dot_parts(const IntermediateGradient& g, const Device& device) {
  if (choose_path(g, device).path == Path::portable) return portable::num_dot_parts(g);
  return hopper::num_dot_parts(g);
}

ab_status compute_weight_gradient(const WeightGradient& g, void* workspace, const Device& device, cudaStream_t stream) {
  if (g.shared) {  // the rows of all groups are adjacent: they form one group
    auto* const rows = static_cast<int32_t*>(workspace);
    AB_RETURN_IF_ERROR(count_rows(g.group_sizes, g.E, g.R, rows, stream));
    WeightGradient whole = g;
    whole.shared = false;
    whole.group_sizes = rows;
    whole.E = 1;
    return compute_weight_gradient(whole, static_cast<char*>(workspace) + kTotalRowsBytes, device, stream);
  }
  if (g.E * g.D * g.N == 0) return ok();
  const int multiprocessors = device.multiprocessors;
  if (choose_path(g, device).path == Path::portable)
    return portable::launch_gemm(g, workspace, multiprocessors, stream);
  return hopper::launch_gemm(g, hopper::choose_tile(g, multiprocessors), workspace, multiprocessors, stream);
}

ab_status compute_factor_pair(const FactorPair& pair, void* workspace, const Device& device, cudaStream_t stream) {
  if (few_rows::supports(pair.rows) || choose_path(pair, device).path == Path::portable) {
    AB_RETURN_IF_ERROR(compute_rows_product(pair.rows, device, stream));
    return compute_weight_gradient(pair.gradient, workspace, device, stream);
  }
  AB_RETURN_IF_ERROR(hopper::launch_gemm(pair, workspace, device.multiprocessors, stream));
  return sum_parts(pair.rows, pair.parts, pair_parts(pair.rows.D), device.multiprocessors, stream);
}

ab_status compute_up(const Fp8Up& up, const Device& device, cudaStream_t stream) {
  if (up.s.R * up.s.F == 0) return ok();
  AB_RETURN_IF_ERROR(check_fp8(up, device));
  return hopper::launch_gemm(up, device.multiprocessors, stream);
}

ab_status compute_rows_product(const Fp8RowsProduct& product, const Device& device, cudaStream_t stream) {
  if (product.R * product.N == 0) return ok();
  if (product.D == 0) {  // no blocks to quantise; rows of a low-rank term are zero
    RowsProduct plain = product;
    plain.low_rank = {};
    return compute_rows_product(plain, device, stream);
  }
  AB_RETURN_IF_ERROR(check_fp8(product, device));
  AB_RETURN_IF_ERROR(hopper::launch_gemm(product, device.multiprocessors, stream));
  const bool clears_padding = product.weights.data != nullptr || product.bias != nullptr;
  if (clears_padding || product.skips_rest) return ok();
  return clear_padding(product.map, {product.y, product.dtype}, product.R, product.N, device.multiprocessors, stream);
}

ab_status compute_intermediate_gradient(const Fp8IntermediateGradient& gradient, const Device& device,
                                        cudaStream_t stream) {
  if (gradient.s.R * gradient.s.F == 0) return ok();
  AB_RETURN_IF_ERROR(check_fp8(gradient, device));
  return hopper::launch_gemm(gradient, device.multiprocessors, stream);
}

int64_t dot_parts(const Fp8IntermediateGradient& gradient) { return hopper::num_dot_parts(gradient); }

}  // namespace anabranch::cuda
