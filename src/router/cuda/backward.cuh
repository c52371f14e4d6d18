// Launch functions of the router's backward pass.
#pragma once

#include <cuda_runtime.h>

#include "core/status.h"
#include "router/backward.h"

namespace anabranch::cuda {

// Converts a selection in another form to [T, K] int32; a map lists lower experts first (selection.cu).
ab_status launch_read_selection(const RouterBackward& op, int32_t* experts, cudaStream_t stream);

// Enqueues a kernel for rows that fit in registers and at most 64 slots, if one exists, and sets *launched
// (backward.cu).
ab_status launch_backward_rows(const RouterBackward& op, cudaStream_t stream, bool* launched);

// Enqueues the kernel for any number of experts and any K (backward_many_experts.cu).
ab_status launch_backward_generic(const RouterBackward& op, cudaStream_t stream);

}  // namespace anabranch::cuda
