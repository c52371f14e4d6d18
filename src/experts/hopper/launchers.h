// The launchers of the kernels, for products.cu, which chooses among them. Each is a template that is instantiated in
// files of its own, made by CMake (cmake/hopper.cmake), so that kernels compile side by side.
#pragma once

#include "core/cuda/wgmma.cuh"
#include "experts/cuda/ops/fp8.h"
#include "experts/cuda/ops/tiles/segments.h"
#include "experts/hopper/hidden_columns.h"
#include "experts/hopper/products.h"

namespace anabranch::cuda::hopper {

// kMajorB: how weights are stored, as W_in [E, D, columns] or transposed, W_out [E, F, D], which these products take
// transposed, or [E, D, F].
template <HiddenColumns kColumns, Major kMajorB>
ab_status launch_up(const Up& up, TileChoice tile, int multiprocessors, cudaStream_t stream);

template <HiddenColumns kColumns, Major kMajorB>
ab_status launch_hidden_gradient(const HiddenGradient& gradient, TileChoice tile, int multiprocessors,
                                 cudaStream_t stream);

// kMajorB: how weights are stored, mn as they are, k transposed.
template <class Out>
struct RowsEpilogue;
template <class Out>
struct ScaleBiasEpilogue;
template <Major kMajorB, template <class> class Epilogue>
ab_status launch_rows_product(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);

// The same of float8_e4m3fn, in tiles of one shape; weights have what is summed over next to next.
template <HiddenColumns kColumns>
ab_status launch_fp8_up(const Fp8Up& up, int multiprocessors, cudaStream_t stream);
template <HiddenColumns kColumns>
ab_status launch_fp8_hidden_gradient(const Fp8HiddenGradient& gradient, int multiprocessors, cudaStream_t stream);
template <template <class> class Epilogue>
ab_status launch_fp8_rows_product(const Fp8RowsProduct& product, int multiprocessors, cudaStream_t stream);

// What of a gradient is gathered.
enum class Gathered { nothing, x, d_y };
template <Gathered kGathered>
ab_status launch_weight_gradient(const WeightGradient& gradient, TileChoice tile, const SegmentBounds& bounds,
                                 const SegmentList& list, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::hopper
