// Quantisation on CUDA, to the bit as on the CPU (experts.h).
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "core/floats.h"
#include "experts/check.h"
#include "experts/cuda/ops/fp8.h"

namespace anabranch::cuda {

// [R, D] rows without gaps.
ab_status quantize_rows(const Floats& x, int64_t R, int64_t D, const Fp8Output& out, cudaStream_t stream);

// [R, F, 2], gate and up in turn; out [R, 2, F].
ab_status quantize_pairs(const Floats& x, int64_t R, int64_t F, const Fp8Output& out, cudaStream_t stream);

// [E, D, P, F] with the strides of `s`; q [E, D, P, F], q_transposed [E, P, F, D], each may be nullptr.
ab_status quantize_weights(const Floats& w, const QuantizedSizes& s, void* q, void* q_transposed, float* scales,
                           bool power_of_two, cudaStream_t stream);

}  // namespace anabranch::cuda
