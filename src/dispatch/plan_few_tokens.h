// The plan for few slots, computed by a single block.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "dispatch/plan.h"

namespace anabranch::cuda {

// Whether this kernel supports the call: experts are indices, rows have no padding, and there are so few slots that
// three kernels would spend more time waiting for each other than running.
bool fits_plan_few(const PlanCall& call);

// expert_bits: number of bits that distinguish -2 ... E - 1.
ab_status plan_few(const PlanCall& call, int expert_bits, cudaStream_t stream);

}  // namespace anabranch::cuda
