// The first half of the feed-forward network on CUDA: hidden rows and their activations.
#pragma once

#include "core/floats.h"
#include "experts/activation.h"
#include "experts/check.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/precision.h"

namespace anabranch::cuda {

// h = x W_in[e] + b_in[e];  a = phi(h_gate, h_up), or act(h) ungated, times the row's weight where it comes early. The
// activation sees h before it is rounded. Padding is zero, and rows past the groups.
struct Up {
  FfnSizes s;
  RowMap map;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  Activation activation;
  Precision precision = Precision::highest;
  bool skips_rest = false;  // rows past the groups need not be written
  Floats x;                 // gathered rows of D
  Floats w_in;              // [E, D, P, F], in the layout of `s`, as b_in and h
  Floats b_in;              // [E, P, F], or none
  Floats weights;           // of slots, or none: 1, also where weights come late
  Floats h;                 // [R, P, F], or none: not wanted
  Floats a;                 // [R, F]
};

}  // namespace anabranch::cuda
