// Weight-bandwidth-bound grouped GEMMs for decode (small M), by mma.sync. experts/cuda/ops describes operations and
// their operands.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "experts/cuda/ops/packed.h"
#include "experts/cuda/ops/rows_product.h"
#include "experts/cuda/ops/up.h"

namespace anabranch::cuda::few_rows {

// Whether these kernels take the GEMM: at most 4 rows per expert on average and 2e9 elements of weights to read,
// weights with the contraction innermost (as in checkpoints), 16-bit elements, and aligned rows of whole 16-byte
// chunks. The rows and factors of a low-rank term must consist of such chunks too.
bool supports(const Up& up);
bool supports(const RowsProduct& product);

// Enqueue the GEMM. Padding rows become zero even without row weights.
ab_status launch_gemm(const Up& up, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const RowsProduct& product, int multiprocessors, cudaStream_t stream);

// Packed weights, for sizes that reads_packed() accepts. Operands may have any alignment, and a low-rank term any rank.
ab_status launch_gemm(const PackedUp& up, cudaStream_t stream);
ab_status launch_gemm(const PackedRowsProduct& product, cudaStream_t stream);

}  // namespace anabranch::cuda::few_rows
