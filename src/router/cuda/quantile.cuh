// Quantile balancing on CUDA: what stands around the forward kernels, which write the tokens' cutoffs.
#pragma once

#include <cuda_runtime.h>

#include "core/status.h"
#include "router/forward.h"
#include "router/token_scale.h"

namespace anabranch::cuda {

// Counts the cutoffs; after the forward kernel has cleared the histogram and written the scales of all tokens.
ab_status launch_count_cutoffs(const RouterForward& op, const TokenScale* scales, cudaStream_t stream);

}  // namespace anabranch::cuda
