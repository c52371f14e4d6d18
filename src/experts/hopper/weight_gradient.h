// Gradients of weights on Hopper's tensor cores: d_w[e] = x^T d_y over the rows of group e.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "anabranch/types.h"
#include "experts/hopper/choose.h"
#include "experts/hopper/row_source.h"

namespace anabranch::cuda {

struct WeightGradient {
  RowSource x;                           // rows of D
  RowSource d_y;                         // rows of N; x or d_y may have slots, not both
  const int32_t* group_sizes = nullptr;  // [E], on the device
  void* d_w = nullptr;                   // [E, D, N]; zero for groups without rows
  int32_t dtype = 0;                     // of x and d_y: AB_BFLOAT16 or AB_FLOAT16
  int32_t d_w_dtype = 0;                 // the same, or AB_FLOAT32
  bool accumulates = false;              // adds to what stands in d_w; AB_FLOAT32 only
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t N = 0;
};

// Whether the kernels can take the product: 16-bit factors, rows of whole 16-byte chunks, no size 0, and all indices
// within what they count in. Without `addresses`, as if all were aligned.
bool runs_on_tensor_cores(const WeightGradient& gradient, bool addresses = true);

// Bytes of the workspace.
size_t workspace_of(const WeightGradient& gradient);

// Enqueues it, with the tiles that choose_weight_tile() takes or with those given (128 x 256 for 128 x 192 where rows
// are gathered).
ab_status multiply_terms(const WeightGradient& gradient, void* workspace, int multiprocessors, cudaStream_t stream);
ab_status multiply_terms(const WeightGradient& gradient, TileChoice tile, void* workspace, int multiprocessors,
                         cudaStream_t stream);

}  // namespace anabranch::cuda
