// The kernels of the router's backward pass and how they are launched.
#pragma once

#include <cuda_runtime.h>

#include "core/status.h"
#include "router/backward.h"

namespace anabranch::cuda {

// [T, K] int32 of a selection that is given in another form; lower experts of a map first (selection.cu).
ab_status launch_read_selection(const RouterBackward& op, int32_t* experts, cudaStream_t stream);

// For rows that registers hold and at most 64 slots (backward.cu): *launched tells whether there is a kernel.
ab_status launch_backward_rows(const RouterBackward& op, cudaStream_t stream, bool* launched);

// For any number of experts and any K (backward_wide.cu).
ab_status launch_backward_wide(const RouterBackward& op, cudaStream_t stream);

}  // namespace anabranch::cuda
