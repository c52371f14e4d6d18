// The first product of the experts on Hopper's tensor cores, with the activation in its epilogue:
//
//     h = x W_in[e] + b_in[e];   a = act(h_gate) h_up, or act(h) ungated, times the row's weight
//
// for the rows of group e.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "experts/hopper/choose.h"
#include "experts/hopper/ffn_product.h"

namespace anabranch::cuda {

struct UpProduct : FfnProduct {  // the weights multiply `a`
  RowSource x;                   // rows of D
  const void* w_in = nullptr;    // [E, D, P, F]
  const void* b_in = nullptr;    // [E, P, F], or nullptr
  void* h = nullptr;             // [R, P, F], zero past the groups but with skips_rest; nullptr: not wanted
  void* a = nullptr;             // [R, F], zero past the groups
};

// Whether the kernels can take it.
bool runs_on_tensor_cores(const UpProduct& product);

// Enqueues it, with the tiles that choose_fused_tile() takes or with those given.
ab_status multiply_up(const UpProduct& product, int multiprocessors, cudaStream_t stream);
ab_status multiply_up(const UpProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
