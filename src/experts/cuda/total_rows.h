// The number of rows in all groups, for sums over the rows of all experts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"

namespace anabranch::cuda {

// Enqueues *rows = the sum of group_sizes [E], at most R. Negative sizes count as 0. rows: one int32 on the device.
ab_status count_rows(const int32_t* group_sizes, int64_t E, int64_t R, int32_t* rows, cudaStream_t stream);

}  // namespace anabranch::cuda
