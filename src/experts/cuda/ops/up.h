// The first half of the feed-forward network on CUDA: intermediate rows and their activations.
#pragma once

#include "core/floats.h"
#include "experts/activation.h"
#include "experts/check.h"
#include "experts/cuda/ops/expert_range.h"
#include "experts/cuda/ops/low_rank.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/cuda/ops/row_part.h"
#include "experts/precision.h"

namespace anabranch::cuda {

// h = x W_in[e] + b_in[e]; a = phi(h_gate, h_up), or act(h) for ungated experts, times the row's weight if it is
// applied early. The activation reads h before rounding. Padding rows and rows after the groups are zero.
struct Up {
  FfnSizes s;
  RowMap map;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  ExpertRange range;
  Activation activation;
  Precision precision = Precision::highest;
  bool skips_rest = false;  // rows after the groups may stay unwritten
  Floats x;                 // gathered rows of D
  Floats w_in;              // [E, D, P, F], in the layout of `s` like b_in and h
  Floats b_in;              // [E, P, F], or none
  Floats weights;           // per assignment; none (1) also if weights are applied late
  Floats h;                 // [R, P, F], or none if not requested
  Floats a;                 // [R, F]
  LowRank low_rank;         // of W_in
  RowPart part;             // hopper::takes_parts()
};

}  // namespace anabranch::cuda
