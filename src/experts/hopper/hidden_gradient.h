// Gradients of what the experts hide, on Hopper's tensor cores. With w the row's weight and d_y the cotangent of its
// result, for the rows of group e:
//
//     da' = d_y W_out[e]^T;   w a and dh = act'(h) w da' from h;   dots = <da', a>
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "experts/hopper/choose.h"
#include "experts/hopper/ffn_product.h"

namespace anabranch::cuda {

struct HiddenGradient : FfnProduct {
  RowSource d_y;                // rows of D
  const void* w_out = nullptr;  // [E, F, D]
  const void* h = nullptr;      // [R, P, F]
  void* dh = nullptr;           // the same, may be h itself, zero past the groups; nullptr: not wanted
  void* weighted_a = nullptr;   // [R, F], zero past the groups; nullptr: not wanted
  float* dots = nullptr;        // [parts_of_dots(), R], zero past the groups: add them up; nullptr: not wanted
};

// Whether the kernels can take it.
bool runs_on_tensor_cores(const HiddenGradient& gradient);

// The tiles that compute it, and the parts that its dots come in.
TileChoice tile_of(const HiddenGradient& gradient, int multiprocessors);
int64_t parts_of_dots(const HiddenGradient& gradient, TileChoice tile);

// Enqueues it.
ab_status multiply_hidden(const HiddenGradient& gradient, TileChoice tile, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
