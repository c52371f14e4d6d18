// The products of float8_e4m3fn on Hopper's tensor cores, as products.h has those of 16 bits; in tiles of one shape.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "experts/cuda/ops/fp8.h"

namespace anabranch::cuda::hopper {

// Why the kernels can't take an operation; nullptr: they can. h, dh, biases and results have 16 bits.
const char* why_not(const Fp8Up& up);
const char* why_not(const Fp8RowsProduct& product);
const char* why_not(const Fp8HiddenGradient& gradient);

// Parts that a hidden gradient's dots come in.
int64_t parts_of_dots(const Fp8HiddenGradient& gradient);

// Enqueue the GEMM.
ab_status launch_gemm(const Fp8Up& up, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const Fp8RowsProduct& product, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const Fp8HiddenGradient& gradient, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::hopper
