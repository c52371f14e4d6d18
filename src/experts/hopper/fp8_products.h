// FP8 (e4m3) expert GEMMs on Hopper tensor cores, like products.h for 16-bit GEMMs; one tile shape.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "experts/cuda/ops/fp8.h"

namespace anabranch::cuda::hopper {

// Returns why the kernels cannot run an operation, or nullptr if they can. h, dh, biases and results have 16-bit
// elements.
const char* unsupported_reason(const Fp8Up& up);
const char* unsupported_reason(const Fp8RowsProduct& product);
const char* unsupported_reason(const Fp8IntermediateGradient& gradient);

// Number of column tiles, each with a partial sum of <da, a> per row.
int64_t num_dot_parts(const Fp8IntermediateGradient& gradient);

// Enqueue the GEMM.
ab_status launch_gemm(const Fp8Up& up, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const Fp8RowsProduct& product, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const Fp8IntermediateGradient& gradient, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::hopper
