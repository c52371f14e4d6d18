// Dtype conversion, for GEMM kernels whose operands must have one dtype.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "core/floats.h"

namespace anabranch::cuda {

// Enqueues to[i] = from[i] for `count` elements, rounded to nearest even. The arrays must not overlap.
ab_status convert(const Floats& from, const Floats& to, int64_t count, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
