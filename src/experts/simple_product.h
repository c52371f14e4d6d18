// Products over the rows of groups for every shape, dtype and alignment on CUDA: the way of what the tensor cores'
// kernels can't take, and of float32, which it multiplies as float32.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"

namespace anabranch::cuda {

// Matrices of any float dtype; element (row, column) of matrix i stands at i * matrix + row * row_step + column *
// column_step.
struct Strided {
  void* data = nullptr;
  int32_t dtype = 0;
  int64_t matrix = 0;
  int64_t row_step = 0;
  int64_t column_step = 0;
};

// y[r] = x[r] w[e] for the rows r of group e, y[r] = 0 past the groups; x [R, K], w [K, N] for each e, y [R, N].
struct SimpleProduct {
  Strided x;
  Strided w;
  Strided y;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  int64_t R = 0;
  int64_t E = 0;
  int64_t K = 0;
  int64_t N = 0;
};

// Indices must be below 2^31, the number of tiles too.
ab_status multiply_simply(const SimpleProduct& product, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
