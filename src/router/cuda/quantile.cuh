// The CUDA histogram of quantile balancing. The forward kernels write the thresholds of the tokens.
#pragma once

#include <cuda_runtime.h>

#include "core/status.h"
#include "router/forward.h"
#include "router/token_scale.h"

namespace anabranch::cuda {

// Counts the thresholds. The forward kernel must have cleared the histogram and written the scales of all tokens.
ab_status launch_count_thresholds(const RouterForward& op, const TokenScale* scales, cudaStream_t stream);

}  // namespace anabranch::cuda
