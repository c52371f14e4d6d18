// Products over the rows of groups, and gradients of weights, for every shape, dtype and alignment on CUDA: the path of
// what the tensor cores' kernels can't take, and of float32, which it multiplies as float32.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "experts/cuda/ops/row_map.h"

namespace anabranch::cuda {

// Matrices of any float dtype; element (row, column) of matrix i stands at i * matrix + row * row_step + column *
// column_step, of a second part of columns part_step further on.
struct Strided {
  void* data = nullptr;
  int32_t dtype = 0;
  int64_t matrix = 0;
  int64_t row_step = 0;
  int64_t column_step = 0;
  bool gathered = false;  // row r stands where the product's map says; zeros where it is padding
  int64_t part_step = 0;
};

struct SimpleProduct {
  Strided a;
  Strided b;
  RowMap map;                            // of gathered rows
  const int32_t* group_sizes = nullptr;  // [E], on the device
  int64_t R = 0;                         // rows of all groups
  int64_t E = 0;
  int64_t rows = 0;  // of a result
  int64_t columns = 0;
  int64_t k = 0;  // of the contraction
};

// out[r] = a[r] b[e] for the rows r of group e, out[r] = 0 past the groups; a [R, k], b [k, columns] for each e,
// out [R, columns]. Indices must be below 2^31, the number of tiles too.
ab_status simple_rows_product(const SimpleProduct& product, const Strided& out, int multiprocessors,
                              cudaStream_t stream);

// out[e] = the sum over the rows r of group e of a[r]^T b[r]; a [R, rows], b [R, columns], out [rows, columns] for each
// e. adds: to what stands in `out`.
ab_status simple_weight_gradient(const SimpleProduct& product, const Strided& out, bool adds, int multiprocessors,
                                 cudaStream_t stream);

// Unsupported where a size, or the number of tiles of a grid of so many blocks, is more than kernels count in int32.
ab_status check_counts(std::initializer_list<int64_t> sizes, int64_t tiles);

}  // namespace anabranch::cuda
