// The second half of the feed-forward network on CUDA.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "core/floats.h"
#include "experts/check.h"
#include "experts/row_map.h"

namespace anabranch::cuda {

// y = w (a W_out[e] + b_out[e]), or a W_out[e] + w b_out[e] where weights come early and `a` has them already. Rounded
// once. Padding, and rows past the groups, are zero.
struct Down {
  FfnSizes s;
  RowMap map;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  bool weight_early = false;
  Floats a;        // [R, F]
  Floats w_out;    // [E, F, D]
  Floats b_out;    // [E, D], or none
  Floats weights;  // of slots, or none: 1
  Floats y;        // [R, D]
};

ab_status compute_down(const Down& down, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
