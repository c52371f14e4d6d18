// Kernel launchers, which products.cu chooses from. CMake (cmake/hopper.cmake) generates one source file per group of
// instantiations, so that kernels compile in parallel.
#pragma once

#include "core/cuda/wgmma.cuh"
#include "experts/cuda/ops/fp8.h"
#include "experts/cuda/ops/tiles/segments.h"
#include "experts/hopper/hidden_columns.h"
#include "experts/hopper/products.h"

namespace anabranch::cuda::hopper {

// kMajorB: major axis of the weights. launch_up: mn for W_in [E, D, columns] as stored, k if transposed.
// launch_hidden_gradient multiplies by W_out^T: k for W_out [E, F, D], mn for [E, D, F].
template <HiddenColumns kColumns, Major kMajorB>
ab_status launch_up(const Up& up, TileChoice tile, int multiprocessors, cudaStream_t stream);

template <HiddenColumns kColumns, Major kMajorB>
ab_status launch_hidden_gradient(const HiddenGradient& gradient, TileChoice tile, int multiprocessors,
                                 cudaStream_t stream);

// kMajorB: mn for weights as stored, k for transposed ones.
template <class Out>
struct RowsEpilogue;
template <class Out>
struct ScaleBiasEpilogue;
template <Major kMajorB, template <class> class Epilogue>
ab_status launch_rows_product(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);

// FP8 (e4m3) GEMMs with K-major weights; one tile shape.
template <HiddenColumns kColumns>
ab_status launch_fp8_up(const Fp8Up& up, int multiprocessors, cudaStream_t stream);
template <HiddenColumns kColumns>
ab_status launch_fp8_hidden_gradient(const Fp8HiddenGradient& gradient, int multiprocessors, cudaStream_t stream);
template <template <class> class Epilogue>
ab_status launch_fp8_rows_product(const Fp8RowsProduct& product, int multiprocessors, cudaStream_t stream);

// Which operand of a weight gradient is gathered.
enum class Gathered { nothing, x, d_y };
template <Gathered kGathered>
ab_status launch_weight_gradient(const WeightGradient& gradient, TileChoice tile, const SegmentBounds& bounds,
                                 const SegmentList& list, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::hopper
