// The first product of the experts on Hopper's tensor cores, with the activation in its epilogue:
//
//     h = x W_in[e] + b_in[e];   a = act(h_gate) h_up, or act(h) ungated, times the row's weight
//
// for the rows of group e.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "experts/hopper/choose.h"
#include "experts/hopper/row_source.h"

namespace anabranch::cuda {

struct UpProduct {
  RowSource x;                           // rows of D
  const void* w_in = nullptr;            // [E, D, P, F]
  const void* b_in = nullptr;            // [E, P, F], or nullptr
  const int32_t* group_sizes = nullptr;  // [E], on the device
  RowWeightSource weights;               // those that multiply `a`; and which rows are padding, zero in h and a
  void* h = nullptr;                     // [R, P, F], zero past the groups; nullptr: not wanted
  void* a = nullptr;                     // [R, F], not written past the groups
  int32_t activation = 0;
  int32_t dtype = 0;  // of all but the weights: AB_BFLOAT16 or AB_FLOAT16
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t P = 0;  // 2: gated; 1
  int64_t F = 0;
};

// Whether the kernels can take the product: 16-bit elements, rows of whole 16-byte chunks, no size 0, and all indices
// within what they count in.
bool runs_on_tensor_cores(const UpProduct& product);

// Enqueues it, with the tiles that choose_row_tile() takes or with those given.
ab_status multiply_up(const UpProduct& product, int multiprocessors, cudaStream_t stream);
ab_status multiply_up(const UpProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
