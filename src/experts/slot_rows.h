// A product over rows that stand for slots, with what a feed-forward network adds to it, on CUDA.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "core/floats.h"
#include "experts/hopper/rows_product.h"
#include "experts/row_map.h"

namespace anabranch::cuda {

// y = w (x op(W[e]) + bias[e]), or x op(W[e]) + w bias[e] where weights come early and x has them already. Rounded
// once. Padding, and rows past the groups, are zero, unless the product skips the rest: then they may have any value.
struct SlotRows {
  RowsProduct product;  // but for its weights, which are these:
  RowMap map;
  Floats weights;  // of slots, or none: 1
  bool weight_early = false;
};

ab_status compute_slot_rows(const SlotRows& rows, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
