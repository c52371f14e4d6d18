// Products over the rows of groups on CUDA: those of the experts' second matrix, of gradients of rows, and any other.
#pragma once

#include <cstdint>

#include "core/floats.h"
#include "core/inline.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/precision.h"

namespace anabranch::cuda {

// y[r] = w (x[r] op(W[e]) + bias[e]) for the rows r of group e, w the weight of the row's slot; or, with weight_early,
// where x has the weights already, x[r] op(W[e]) + w bias[e]. Rounded once. Padding, and rows past the groups, are
// zero, unless the rest is skipped: then they may have any value.
struct RowsProduct {
  const void* x = nullptr;  // [R, D]; zero in padding where y is to be zero there and W may hold anything
  const void* w = nullptr;  // [E, D, N]; transposed [E, N, D]; or a window of wider ones, see w_columns
  bool transposed = false;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  void* y = nullptr;                     // [R, N]
  const void* bias = nullptr;            // [E, N] or its window, or nullptr
  RowMap map;                            // which rows are padding
  Floats weights{};                      // of slots, or none: 1
  bool weight_early = false;
  int32_t dtype = 0;  // of all but the weights
  Precision precision = Precision::highest;
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t N = 0;
  bool skips_rest = false;
  int64_t w_columns = 0;  // of W and bias as they are stored, of which `w` and `bias` point at the first; 0: N

  AB_INLINE int64_t stored_columns() const { return w_columns > 0 ? w_columns : N; }
  // Whether weights multiply the product itself.
  bool scales() const { return weights.data != nullptr && !weight_early; }
  // Whether they multiply the bias alone.
  AB_INLINE bool weighs_bias() const { return bias != nullptr && weights.data != nullptr && weight_early; }
};

}  // namespace anabranch::cuda
