// Kernel launchers, which products.cc chooses from. CMake (cmake/portable.cmake) generates one source file per group of
// instantiations, so that kernels compile in parallel.
#pragma once

#include "core/major.h"
#include "experts/cuda/ops/packed.h"
#include "experts/cuda/ops/tiles/segments.h"
#include "experts/portable/products.h"
#include "experts/portable/tile_shape.h"

namespace anabranch::cuda::portable {

// kDtype: an ab_dtype. kHasAdapter: with a low-rank term; only for the main tile.
template <int32_t kDtype, Precision kPrecision, TileChoice kTile, bool kHasAdapter>
ab_status launch_up(const Up& up, int multiprocessors, cudaStream_t stream);
template <int32_t kDtype, Precision kPrecision, TileChoice kTile, bool kHasAdapter>
ab_status launch_rows_product(const RowsProduct& product, int multiprocessors, cudaStream_t stream);
template <int32_t kDtype, Precision kPrecision, TileChoice kTile, bool kHasAdapter>
ab_status launch_intermediate_gradient(const IntermediateGradient& gradient, int multiprocessors, cudaStream_t stream);
// GEMMs with packed weights, with or without an adapter. Format: the type of the weights. kMajorB: k if the GEMM sums
// along their rows in memory, else mn.
struct Mxfp4;
struct Fp8Blocks;
template <class Format, int32_t kDtype, TileChoice kTile>
ab_status launch_packed_up(const PackedUp& up, int multiprocessors, cudaStream_t stream);
template <class Format, int32_t kDtype, TileChoice kTile>
ab_status launch_packed_intermediate_gradient(const PackedIntermediateGradient& gradient, int multiprocessors,
                                              cudaStream_t stream);
template <class Format, Major kMajorB, int32_t kDtype, TileChoice kTile>
ab_status launch_packed_rows_product(const PackedRowsProduct& product, int multiprocessors, cudaStream_t stream);

template <int32_t kDtype, Precision kPrecision, TileChoice kTile>
ab_status launch_weight_gradient(const WeightGradient& gradient, const SegmentBounds& bounds, const SegmentList& list,
                                 int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::portable
