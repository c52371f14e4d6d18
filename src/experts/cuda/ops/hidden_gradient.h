// Gradients of the hidden rows of the feed-forward network on CUDA.
#pragma once

#include <cstdint>

#include "core/floats.h"
#include "experts/activation.h"
#include "experts/check.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/precision.h"

namespace anabranch::cuda {

// With w the row's weight and `a` recomputed from h:
//
//     da' = d_y W_out[e]^T;  dh = phi'(h) w da';  weighted_a = w a;  <da', a> = the sum of dots[:, r].
//
// Padding is zero, and so is everything past the groups.
struct HiddenGradient {
  FfnSizes s;
  RowMap map;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  Activation activation;
  Precision precision = Precision::highest;
  bool skips_rest = false;  // rows past the groups need not be written
  Floats d_y;               // gathered rows of D; has the dtype of w_out, h, dh and weighted_a
  Floats w_out;             // [E, F, D], in the layout of `s`, as h and dh
  Floats weights;           // of slots, or none: 1
  Floats h;                 // [R, P, F]
  Floats dh;                // [R, P, F], or none; may be the memory of h
  Floats weighted_a;        // [R, F], or none
  float* dots = nullptr;    // [dot_parts(), R], or nullptr
};

}  // namespace anabranch::cuda
