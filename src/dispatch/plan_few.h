// The plan of few slots, by one block.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "dispatch/plan.h"

namespace anabranch::cuda {

// Whether it is one of the usual plans, experts as indices and rows without padding, of so few slots that three kernels
// would wait for one another longer than they run.
bool is_few(const PlanCall& call);

// expert_bits: that tell -2 ... E - 1 apart.
ab_status plan_few(const PlanCall& call, int expert_bits, cudaStream_t stream);

}  // namespace anabranch::cuda
