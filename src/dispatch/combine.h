// Launches the sum of rows by token on CUDA.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "dispatch/check.h"

namespace anabranch::cuda {

// Enqueues the sum over the columns of `rows`. `out` and `addend` may be windows of columns of wider tensors: `data`
// points at the first column of the window, and D is the width of the tensor.
ab_status compute_sum(const GatherSum& sum, cudaStream_t stream);

}  // namespace anabranch::cuda
