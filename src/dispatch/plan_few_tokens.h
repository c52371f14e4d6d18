// The plan for few tokens, computed by a single block.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "dispatch/plan.h"

namespace anabranch::cuda {

// Whether one block computes the plan: experts are indices, rows have no padding, and there are so few assignments that
// the three kernels of plan.cu would spend more time waiting for each other than running.
bool fits_few_tokens(const PlanCall& call);

// expert_bits: number of bits that distinguish -2 ... E - 1.
ab_status plan_few_tokens(const PlanCall& call, int expert_bits, cudaStream_t stream);

}  // namespace anabranch::cuda
