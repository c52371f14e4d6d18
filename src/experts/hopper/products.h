// The products of the experts on Hopper's tensor cores: what the kernels can take, the tiles they would take it in, and
// their launch. Operations and their operands are described beside the phases that use them, in experts/cuda.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "anabranch/types.h"
#include "experts/cuda/hidden_gradient.h"
#include "experts/cuda/rows_product.h"
#include "experts/cuda/up.h"
#include "experts/cuda/weight_gradient.h"
#include "experts/hopper/tile_choice.h"

namespace anabranch::cuda::hopper {

// Whether the kernels can take an operation: 16-bit elements, rows of whole 16-byte chunks from aligned addresses on,
// no size 0, and all indices within what they count in. Alignment::ignored: as if all addresses were aligned, to bound
// a workspace.
enum class Alignment { checked, ignored };
bool supports(const Up& up);
bool supports(const RowsProduct& product);
bool supports(const HiddenGradient& gradient);
bool supports(const WeightGradient& gradient, Alignment alignment = Alignment::checked);

// The tiles that tile_choice.h takes for it.
TileChoice choose_tile(const Up& up, int multiprocessors);
TileChoice choose_tile(const RowsProduct& product, int multiprocessors);
TileChoice choose_tile(const HiddenGradient& gradient, int multiprocessors);
TileChoice choose_tile(const WeightGradient& gradient, int multiprocessors);

// Parts that a hidden gradient's dots come in.
int64_t parts_of_dots(const HiddenGradient& gradient, TileChoice tile);

// Bytes of the workspace of a gradient of weights.
size_t workspace_of(const WeightGradient& gradient);

// Enqueue it. A shape of tiles that an operation has no kernel for (128 x 192 with a fused epilogue or a gather) is
// taken for one that it has.
ab_status multiply(const Up& up, TileChoice tile, int multiprocessors, cudaStream_t stream);
ab_status multiply(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);
ab_status multiply(const HiddenGradient& gradient, TileChoice tile, int multiprocessors, cudaStream_t stream);
ab_status multiply(const WeightGradient& gradient, TileChoice tile, void* workspace, int multiprocessors,
                   cudaStream_t stream);

}  // namespace anabranch::cuda::hopper
