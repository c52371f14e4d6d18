// Sums of rows by token on CUDA.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "dispatch/check.h"

namespace anabranch::cuda {

// The columns of `rows`. Those of `out` and `addend` may be a window of wider tensors, whose first column `data` points
// at and whose width D says.
ab_status compute_sum(const GatherSum& sum, cudaStream_t stream);

}  // namespace anabranch::cuda
