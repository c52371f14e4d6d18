// Launches the phases of the experts. Each runs on the first path whose kernels support its operands.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "core/cuda/device.h"
#include "core/status.h"
#include "experts/cuda/ops/factor_pair.h"
#include "experts/cuda/ops/fp8.h"
#include "experts/cuda/ops/intermediate_gradient.h"
#include "experts/cuda/ops/packed.h"
#include "experts/cuda/ops/rows_product.h"
#include "experts/cuda/ops/up.h"
#include "experts/cuda/ops/weight_gradient.h"
#include "experts/cuda/packed_path.h"

namespace anabranch::cuda {

ab_status compute_up(const Up& up, const Device& device, cudaStream_t stream);
ab_status compute_rows_product(const RowsProduct& product, const Device& device, cudaStream_t stream);
ab_status compute_intermediate_gradient(const IntermediateGradient& gradient, const Device& device,
                                        cudaStream_t stream);

// GEMMs that read packed weights as they are. path: not `unpacked`.
ab_status compute_packed(const PackedUp& up, PackedPath path, const Device& device, cudaStream_t stream);
ab_status compute_packed(const PackedIntermediateGradient& gradient, PackedPath path, const Device& device,
                         cudaStream_t stream);
ab_status compute_packed(const PackedRowsProduct& product, PackedPath path, const Device& device, cudaStream_t stream);

// The GEMM of weights that may be packed, on the path that choose_path() returns. compute_unpacked(): by plain weights.
template <class Packed, class Unpacked>
ab_status compute_maybe_packed(bool is_packed, const Packed& packed, const Device& device, cudaStream_t stream,
                               const Unpacked& compute_unpacked) {
  auto path = PackedPath::unpacked;
  if (is_packed) AB_RETURN_IF_ERROR(choose_path(packed, device, &path));
  return path == PackedPath::unpacked ? compute_unpacked() : compute_packed(packed, path, device, stream);
}

// Number of partial sums of <da', a> that the gradient writes; at most max_dot_parts(F).
int64_t dot_parts(const IntermediateGradient& gradient, const Device& device);

// x and d_y have one dtype, d_w has that dtype or float32. workspace: weight_gradient_bytes(R, E, D, N, shared)
// bytes.
ab_status compute_weight_gradient(const WeightGradient& gradient, void* workspace, const Device& device,
                                  cudaStream_t stream);

// In one kernel where there is one, else in two. workspace: that of the gradient.
ab_status compute_factor_pair(const FactorPair& pair, void* workspace, const Device& device, cudaStream_t stream);

// FP8 (e4m3) phases. They return AB_UNSUPPORTED if Hopper's FP8 kernels cannot run.
ab_status compute_up(const Fp8Up& up, const Device& device, cudaStream_t stream);
ab_status compute_rows_product(const Fp8RowsProduct& product, const Device& device, cudaStream_t stream);
ab_status compute_intermediate_gradient(const Fp8IntermediateGradient& gradient, const Device& device,
                                        cudaStream_t stream);
int64_t dot_parts(const Fp8IntermediateGradient& gradient);

}  // namespace anabranch::cuda
