// Bias gradients on CUDA: sums over the rows of each expert.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "anabranch/types.h"
#include "core/floats.h"
#include "experts/cuda/ops/row_map.h"

namespace anabranch::cuda {

// d_bias[e] = sum of weights[r] m[r] over the rows r of expert e, accumulated in float32; zero without rows.
struct BiasGradient {
  RowMap map;
  bool gathers = false;                  // the map selects the rows of m, which then have no padding
  Floats m;                              // [R, N], or gathered rows of N
  Floats weights{};                      // per assignment, or none (1)
  const int32_t* group_sizes = nullptr;  // [E], on the device
  Floats d_bias;                         // [E, N]
  int64_t R = 0;
  int64_t E = 0;
  int64_t N = 0;
};

// Workspace size in bytes: N floats per 512 rows, plus N floats per expert.
size_t workspace_of(const BiasGradient& gradient);

ab_status compute_bias_gradient(const BiasGradient& gradient, void* workspace, int multiprocessors,
                                cudaStream_t stream);

}  // namespace anabranch::cuda
