// Gradients of the row weights on CUDA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "core/floats.h"
#include "experts/check.h"
#include "experts/cuda/ops/row_map.h"

namespace anabranch::cuda {

// d_weights[assignment of row r] = sum of dots[:, r] + <d_y[r], b_out[e]> for the rows r of expert e. Zero for
// assignments without a row, and for rows without an expert.
struct SlotGradient {
  FfnSizes s;
  RowMap map;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  const float* dots = nullptr;           // [parts, R]: partial sums of <da', a>
  int64_t parts = 0;
  Floats d_y;                  // gathered rows of D
  Floats b_out;                // [E, D] in the dtype of d_y, or none
  float* d_weights = nullptr;  // [T, K], or [R]
};

ab_status compute_slot_gradient(const SlotGradient& gradient, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
