// The kernels of the router's backward pass and how they are launched.
#pragma once

#include <cuda_runtime.h>

#include "core/status.h"
#include "router/backward.h"

namespace anabranch::cuda {

// For rows that registers hold and at most 64 slots (backward.cu): *launched tells whether there is a kernel.
ab_status launch_backward_rows(const RouterBackward& op, cudaStream_t stream, bool* launched);

// For any number of experts and any K (backward_wide.cu).
ab_status launch_backward_wide(const RouterBackward& op, cudaStream_t stream);

}  // namespace anabranch::cuda
