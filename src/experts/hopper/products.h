// The expert GEMMs on Hopper tensor cores: supported operands, tile choice and launch functions. experts/cuda/ops
// describes operations and their operands.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "experts/cuda/ops/factor_pair.h"
#include "experts/cuda/ops/intermediate_gradient.h"
#include "experts/cuda/ops/rows_product.h"
#include "experts/cuda/ops/up.h"
#include "experts/cuda/ops/weight_gradient.h"
#include "experts/hopper/tile_choice.h"

namespace anabranch::cuda::hopper {

// Returns why the kernels cannot run an operation, or nullptr if they can. They take 16-bit elements, aligned rows of
// whole 16-byte chunks, nonzero sizes, and sizes within int32 indexing.
const char* unsupported_reason(const Up& up);
const char* unsupported_reason(const RowsProduct& product);
const char* unsupported_reason(const IntermediateGradient& gradient);
const char* unsupported_reason(const WeightGradient& gradient);
const char* unsupported_reason(const FactorPair& pair);

// Whether there is a kernel for a part of the rows (RowPart): with gathered bfloat16 rows of gated experts whose gate
// and up columns do not alternate, without adapters. These are few, because each is one more kernel to compile.
bool takes_parts(const Up& up);
bool takes_parts(const IntermediateGradient& gradient);

// Returns the tile that tile_choice.h selects.
TileChoice choose_tile(const Up& up, int multiprocessors);
TileChoice choose_tile(const RowsProduct& product, int multiprocessors);
TileChoice choose_tile(const IntermediateGradient& gradient, int multiprocessors);
TileChoice choose_tile(const WeightGradient& gradient, int multiprocessors);

// Number of partial sums of <da', a> per row, whatever the tile.
int64_t num_dot_parts(const IntermediateGradient& gradient);

// Enqueue the GEMM. If it has no kernel with this tile (128 x 192 with a fused epilogue or a gather), another tile is
// used.
ab_status launch_gemm(const Up& up, TileChoice tile, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);
ab_status launch_gemm(const IntermediateGradient& gradient, TileChoice tile, int multiprocessors, cudaStream_t stream);
// workspace: weight_gradient_bytes() bytes.
ab_status launch_gemm(const WeightGradient& gradient, TileChoice tile, void* workspace, int multiprocessors,
                      cudaStream_t stream);
// Without the sum of the parts. workspace: that of the gradient.
ab_status launch_gemm(const FactorPair& pair, void* workspace, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::hopper
