// The term that a low-rank adapter adds to a grouped GEMM on CUDA.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// Adds u op(B[e]) to the float32 sums of x op(W[e]), after all terms of W. B is stored like w: in the same orientation,
// with columns in the same order; if w is a window of wider matrices, so is B. All operands have the dtype of x.
struct LowRank {
  const void* u = nullptr;  // [R, rank]; padding rows do not affect results
  const void* b = nullptr;  // [E, rank, N]; transposed: [E, N, rank]
  bool shared = false;      // one matrix B for all experts
  int64_t rank = 0;         // 0: no term
};

}  // namespace anabranch::cuda
