// Gradients of the experts' matrices on CUDA.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "anabranch/types.h"
#include "core/cuda/device.h"
#include "core/floats.h"
#include "experts/cuda/row_map.h"
#include "experts/precision.h"

namespace anabranch::cuda {

// d_w[e] = x^T d_y over the rows of group e, zero without rows.
struct WeightGradient {
  RowMap map;              // of the factor that is gathered
  Floats x;                // [R, D], or gathered rows of D
  bool gathers_x = false;  // at most one of both
  Floats d_y;              // [R, N], or gathered rows of N
  bool gathers_d_y = false;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  Floats d_w;                            // [E, D, N]
  Precision precision = Precision::highest;
  bool accumulates = false;  // adds to what stands in d_w, float32
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t N = 0;
};

// Bytes of the workspace, from shapes and dtypes: what any path takes.
size_t workspace_of(const WeightGradient& gradient);

// By whichever path can take it.
ab_status compute_weight_gradient(const WeightGradient& gradient, void* workspace, const Device& device,
                                  cudaStream_t stream);

}  // namespace anabranch::cuda
