// The products of the experts on tensor cores as every GPU since Ampere has them (mma.sync): which sizes they take, and
// their launch. experts/cuda/ops describes operations and their operands.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "experts/cuda/ops/hidden_gradient.h"
#include "experts/cuda/ops/rows_product.h"
#include "experts/cuda/ops/up.h"
#include "experts/cuda/ops/weight_gradient.h"

namespace anabranch::cuda::portable {

// The kernels take float32, bfloat16 and float16, any width and any address; all operands have one dtype. These return
// AB_UNSUPPORTED where a size or the number of tiles is more than kernels count; launch_gemm checks them too.
ab_status check(const Up& up);
ab_status check(const RowsProduct& product);
ab_status check(const HiddenGradient& gradient);
ab_status check(const WeightGradient& gradient);

// Parts that a hidden gradient's dots come in.
int64_t parts_of_dots(const HiddenGradient& gradient);

// Enqueue the GEMM.
ab_status launch_gemm(const Up& up, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const RowsProduct& product, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const HiddenGradient& gradient, int multiprocessors, cudaStream_t stream);
// workspace: of weight_gradient_bytes().
ab_status launch_gemm(const WeightGradient& gradient, void* workspace, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::portable
