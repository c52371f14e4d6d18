// Sums rows by token on CUDA.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "dispatch/check.h"

namespace anabranch::cuda {

// Sums the columns of `rows`. `out` and `addend` may be a window of columns of wider tensors: `data` points at its
// first column, and D is the width of the tensor.
ab_status compute_sum(const GatherSum& sum, cudaStream_t stream);

}  // namespace anabranch::cuda
