// Products on CUDA by whichever way can take them: on the tensor cores, else the simple way.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "anabranch/types.h"
#include "core/floats.h"
#include "experts/hopper/rows_product.h"
#include "experts/row_map.h"
#include "experts/simple_product.h"

namespace anabranch::cuda {

// The simple way's operands of a product.
SimpleProduct simple_product(const RowsProduct& product);

// y[r] = x[r] op(W[e]) for the rows r of group e, zero past the groups.
ab_status compute_rows(const RowsProduct& product, int multiprocessors, cudaStream_t stream);

// The same of a feed-forward network's rows: y is zero in padding too, where x must be zero but W may hold anything.
ab_status compute_rows(const RowsProduct& product, const RowMap& map, int multiprocessors, cudaStream_t stream);

// d_w[e] = x^T d_y over the rows of group e, zero without rows.
struct TermsProduct {
  RowMap map;              // of the factor that is gathered
  Floats x;                // [R, D], or gathered rows of D
  bool gathers_x = false;  // at most one of both
  Floats d_y;              // [R, N], or gathered rows of N
  bool gathers_d_y = false;
  const int32_t* group_sizes = nullptr;  // [E], on the device
  Floats d_w;                            // [E, D, N]
  bool accumulates = false;              // adds to what stands in d_w, float32
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t N = 0;
};

// Bytes of the workspace, from shapes and dtypes.
size_t workspace_of(const TermsProduct& product);

ab_status compute_terms(const TermsProduct& product, void* workspace, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
