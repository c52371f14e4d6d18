// The expert GEMMs on mma.sync, for sm80 and newer: supported sizes and launch functions. experts/cuda/ops describes
// operations and their operands.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "experts/cuda/ops/intermediate_gradient.h"
#include "experts/cuda/ops/rows_product.h"
#include "experts/cuda/ops/up.h"
#include "experts/cuda/ops/weight_gradient.h"

namespace anabranch::cuda::portable {

// The kernels take float32, bfloat16 and float16, any width and any address. All operands have one dtype. These
// functions return AB_UNSUPPORTED if a size or the number of tiles exceeds int32 indexing; launch_gemm() checks this
// too.
ab_status check(const Up& up);
ab_status check(const RowsProduct& product);
ab_status check(const IntermediateGradient& gradient);
ab_status check(const WeightGradient& gradient);

// Number of column tiles, each with a partial sum of <da, a> per row.
int64_t num_dot_parts(const IntermediateGradient& gradient);

// Enqueue the GEMM.
ab_status launch_gemm(const Up& up, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const RowsProduct& product, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const IntermediateGradient& gradient, int multiprocessors, cudaStream_t stream);
// workspace: weight_gradient_bytes() bytes.
ab_status launch_gemm(const WeightGradient& gradient, void* workspace, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::portable
