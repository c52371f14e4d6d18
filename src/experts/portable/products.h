// The products of the experts on tensor cores as every GPU since Ampere has them (mma.sync): what the kernels can take,
// and their launch. Operations and their operands are described beside the phases that use them, in experts/cuda.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "experts/cuda/ops/hidden_gradient.h"
#include "experts/cuda/ops/rows_product.h"
#include "experts/cuda/ops/up.h"
#include "experts/cuda/ops/weight_gradient.h"

namespace anabranch::cuda::portable {

// Why the kernels can't take an operation; nullptr: they can. They take float32, bfloat16 and float16, any width and
// address, but one dtype in all factors, and sizes and numbers of tiles that are counted in int32.
const char* why_not(const Up& up);
const char* why_not(const RowsProduct& product);
const char* why_not(const HiddenGradient& gradient);
const char* why_not(const WeightGradient& gradient);

// Parts that a hidden gradient's dots come in.
int64_t parts_of_dots(const HiddenGradient& gradient);

// Enqueue it.
ab_status multiply(const Up& up, int multiprocessors, cudaStream_t stream);
ab_status multiply(const RowsProduct& product, int multiprocessors, cudaStream_t stream);
ab_status multiply(const HiddenGradient& gradient, int multiprocessors, cudaStream_t stream);
// workspace: of weight_gradient_bytes().
ab_status multiply(const WeightGradient& gradient, void* workspace, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::portable
