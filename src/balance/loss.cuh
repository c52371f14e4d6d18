// Launches the load-balancing loss on the device.
#pragma once

#include <cuda_runtime.h>

#include "balance/loss.h"
#include "core/status.h"

namespace anabranch::cuda {

ab_status launch_load_balance_loss(const LoadBalanceLoss& op, cudaStream_t stream);

}  // namespace anabranch::cuda
