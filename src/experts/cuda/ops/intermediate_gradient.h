// Gradients of the intermediate rows of the feed-forward network on CUDA.
#pragma once

#include <cstdint>

#include "core/floats.h"
#include "experts/activation.h"
#include "experts/check.h"
#include "experts/cuda/ops/expert_range.h"
#include "experts/cuda/ops/low_rank.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/cuda/ops/row_part.h"
#include "experts/precision.h"

namespace anabranch::cuda {

// For a row of weight w, with `a` recomputed from h:
//
//     da' = d_y W_out[e]^T;  dh = phi'(h) w da';  weighted_a = w a;  <da', a> = the sum of dots[:, r].
//
// Padding rows and rows after the groups are zero.
struct IntermediateGradient {
  FfnSizes s;
  RowMap map;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  ExpertRange range;
  Activation activation;
  Precision precision = Precision::highest;
  bool skips_rest = false;  // rows after the groups may stay unwritten
  Floats d_y;               // gathered rows of D, in the dtype of w_out, h, dh and weighted_a
  Floats w_out;             // [E, F, D], in the layout of `s` like h and dh
  Floats weights;           // per assignment, or none (1)
  Floats h;                 // [R, P, F]
  Floats dh;                // [R, P, F], or none; may alias h
  Floats weighted_a;        // [R, F], or none
  float* dots = nullptr;    // [dot_parts(), R]: partial sums of <da', a>; or nullptr
  LowRank low_rank;         // of W_out^T
  RowPart part;             // hopper::takes_parts()
};

}  // namespace anabranch::cuda
