// Expert GEMMs with packed weights on Hopper tensor cores, like products.h for plain weights. They have the bits of the
// GEMMs with unpacked weights.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "experts/cuda/ops/packed.h"

namespace anabranch::cuda::hopper {

// Returns why the kernels cannot run an operation, or nullptr if they can. They take bfloat16 rows and gated experts;
// in MXFP4 gate and up columns may alternate. Row weights are not applied to the results of row GEMMs.
const char* unsupported_reason(const PackedUp& up);
const char* unsupported_reason(const PackedIntermediateGradient& gradient);
const char* unsupported_reason(const PackedRowsProduct& product);

// Enqueue the GEMM.
ab_status launch_gemm(const PackedUp& up, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const PackedIntermediateGradient& gradient, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const PackedRowsProduct& product, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::hopper
