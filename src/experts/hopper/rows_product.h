// Products over the rows of groups on Hopper's tensor cores: y[r] = x[r] op(W[e]) for the rows r of group e; or with a
// bias or weights, y[r] = scale x[r] W[e] + weight bias[e], zero in rows that are padding.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "core/inline.h"
#include "experts/hopper/choose.h"
#include "experts/hopper/row_source.h"

namespace anabranch::cuda {

struct RowsProduct {
  const void* x = nullptr;  // [R, K]
  const void* w = nullptr;  // [E, K, N]; transposed [E, N, K]; or a window of wider ones, see w_columns
  bool transposed = false;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  void* y = nullptr;                     // [R, N]; rows past the groups become zero but with skips_rest
  const void* bias = nullptr;            // [E, N] or its window, or nullptr; this and what follows: W not transposed
  RowWeightSource weights;               // and which rows are padding
  bool scales = false;                   // scale is the weight; else 1
  int32_t dtype = 0;                     // of all but the weights: AB_BFLOAT16 or AB_FLOAT16
  int64_t R = 0;
  int64_t E = 0;
  int64_t K = 0;
  int64_t N = 0;
  bool skips_rest = false;  // rows past the groups are not written
  int64_t w_columns = 0;    // of W and bias as they are stored, of which `w` and `bias` point at the first; 0: N

  AB_INLINE int64_t stored_columns() const { return w_columns > 0 ? w_columns : N; }
};

// Whether the kernels can take the product: 16-bit elements, rows of whole 16-byte chunks, no size 0, and all indices
// within what they count in.
bool runs_on_tensor_cores(const RowsProduct& product);

// Enqueues it, with the tiles that choose_row_tile() takes or with those given.
ab_status multiply_rows(const RowsProduct& product, int multiprocessors, cudaStream_t stream);
ab_status multiply_rows(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
