// Products of so few rows that reading the weights is all that takes time, on tensor cores as every GPU since Ampere
// has them. Operations and their operands are described beside the phases that use them, in experts/cuda.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "experts/cuda/ops/rows_product.h"
#include "experts/cuda/ops/up.h"

namespace anabranch::cuda::few_rows {

// Whether it is one of these: at most 4 rows an expert in the mean and 2e9 elements of weights to read, weights with k
// inside (as checkpoints have them), 16-bit elements, rows of whole 16-byte chunks from aligned addresses on.
bool takes(const Up& up);
bool takes(const RowsProduct& product);

// Enqueue it. Padding of a product without weights is zero too.
ab_status multiply(const Up& up, int multiprocessors, cudaStream_t stream);
ab_status multiply(const RowsProduct& product, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::few_rows
