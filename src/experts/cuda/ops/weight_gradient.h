// Weight gradients of the experts on CUDA.
#pragma once

#include <cstdint>

#include "core/floats.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/precision.h"

namespace anabranch::cuda {

// d_w[e] = x^T d_y over the rows of group e; zero without rows. If shared, d_w is one matrix, the sum over the rows of
// all groups.
struct WeightGradient {
  RowMap map;              // maps the gathered operand
  Floats x;                // [R, D], or gathered rows of D
  bool gathers_x = false;  // at most one operand is gathered
  Floats d_y;              // [R, N], or gathered rows of N
  bool gathers_d_y = false;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  Floats d_w;                            // [E or 1, D, N]
  Precision precision = Precision::highest;
  bool accumulates = false;  // add to d_w, which must be float32
  bool shared = false;
  // Not 0: the workspace still holds the segments of an earlier gradient of the same groups with use 0 and the same
  // bounds. Every gradient has its own use, less than kSegmentUses.
  int segment_use = 0;
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t N = 0;
};

}  // namespace anabranch::cuda
