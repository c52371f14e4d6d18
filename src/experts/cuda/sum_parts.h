// Sums of rows that a GEMM computed in parts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "experts/cuda/ops/rows_product.h"

namespace anabranch::cuda {

// Enqueues p.y [R, N] = p.factor times the sum of `count` parts [R, N], added in order. N is a multiple of 4. Padding
// rows and rows after the groups become zero.
ab_status sum_parts(const RowsProduct& p, const float* parts, int64_t count, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
