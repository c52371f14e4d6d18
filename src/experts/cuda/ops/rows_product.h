// Grouped GEMMs over rows on CUDA: the down GEMM, gradients of rows, and others.
#pragma once

#include <cstdint>

#include "core/floats.h"
#include "core/inline.h"
#include "experts/cuda/ops/expert_range.h"
#include "experts/cuda/ops/low_rank.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/precision.h"

namespace anabranch::cuda {

// y[r] = w (factor x[r] op(W[e]) + bias[e]) for the rows r of group e, with the weight w of the row's assignment. With
// weight_early, x already contains the weights: y[r] = factor x[r] op(W[e]) + w bias[e]. Rounded once. Padding rows and
// rows after the groups are zero; if they are skipped, rows after the groups are undefined.
struct RowsProduct {
  const void* x = nullptr;  // [R, D]; padding rows must be zero if y must be zero there for any W, NaN included
  const void* w = nullptr;  // [E, D, N]; transposed: [E, N, D]; or a window of wider matrices, see w_columns
  bool transposed = false;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  void* y = nullptr;                     // [R, N]
  const void* bias = nullptr;            // [E, N] or a window, or nullptr
  RowMap map;                            // identifies padding rows
  Floats weights{};                      // per assignment, or none (1)
  bool weight_early = false;
  int32_t dtype = 0;  // of all tensors except the weights
  Precision precision = Precision::highest;
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t N = 0;
  bool skips_rest = false;
  int64_t w_columns = 0;  // stored columns of W and bias, if `w` and `bias` point to a window of N columns; 0: N
  LowRank low_rank{};
  ExpertRange range{};
  // The rows u of a low-rank adapter. Only these have the fields below, and they have neither bias nor weights.
  bool thin = false;
  float factor = 1.0f;
  bool shared_w = false;   // one matrix W for all experts
  bool gathers_x = false;  // x are rows of tokens, which the map selects

  AB_INLINE int64_t stored_columns() const { return w_columns > 0 ? w_columns : N; }
  // Whether the weights multiply the GEMM's result.
  bool scales() const { return weights.data != nullptr && !weight_early; }
  // Whether the weights multiply only the bias.
  AB_INLINE bool weighs_bias() const { return bias != nullptr && weights.data != nullptr && weight_early; }
};

}  // namespace anabranch::cuda
