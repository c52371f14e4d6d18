// Quantisation on CUDA; bitwise equal to the CPU (experts.h).
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "core/floats.h"
#include "experts/check.h"
#include "experts/cuda/ops/fp8.h"

namespace anabranch::cuda {

// Quantises contiguous rows [R, D].
ab_status quantize_rows(const Floats& x, int64_t R, int64_t D, const Fp8Output& out, cudaStream_t stream);

// Quantises rows [R, F, 2] with interleaved gate and up; out [R, 2, F].
ab_status quantize_pairs(const Floats& x, int64_t R, int64_t F, const Fp8Output& out, cudaStream_t stream);

// Quantises weights [E, D, P, F] with the strides of `s`. q [E, D, P, F] and q_transposed [E, P, F, D] may be nullptr.
ab_status quantize_weights(const Floats& w, const QuantizedSizes& s, void* q, void* q_transposed, float* scales,
                           bool power_of_two, cudaStream_t stream);

}  // namespace anabranch::cuda
