// Kernel launchers, which products.cc and fp8_products.cc choose from. CMake (cmake/hopper.cmake) generates one source
// file per group of instantiations, so that kernels compile in parallel.
#pragma once

#include "core/major.h"
#include "experts/cuda/ops/factor_pair.h"
#include "experts/cuda/ops/fp8.h"
#include "experts/cuda/ops/packed.h"
#include "experts/cuda/ops/tiles/segments.h"
#include "experts/hopper/gate_up_layout.h"
#include "experts/hopper/products.h"

namespace anabranch::cuda::hopper {

// kMajorB: major axis of the weights. launch_up: mn for W_in [E, D, columns] as stored, k if transposed.
// launch_intermediate_gradient multiplies by W_out^T: k for W_out [E, F, D], mn for [E, D, F].
template <GateUpLayout kLayout, Major kMajorB>
ab_status launch_up(const Up& up, TileChoice tile, int multiprocessors, cudaStream_t stream);

template <GateUpLayout kLayout, Major kMajorB>
ab_status launch_intermediate_gradient(const IntermediateGradient& gradient, TileChoice tile, int multiprocessors,
                                       cudaStream_t stream);

// Launchers for a part of the rows, see takes_parts().
template <Major kMajorB>
ab_status launch_part_of_up(const Up& up, TileChoice tile, int multiprocessors, cudaStream_t stream);
template <Major kMajorB>
ab_status launch_part_of_intermediate_gradient(const IntermediateGradient& gradient, TileChoice tile,
                                               int multiprocessors, cudaStream_t stream);

// kMajorB: mn for weights as stored, k for transposed ones.
template <class Out>
struct RowsEpilogue;
template <class Out>
struct ScaleBiasEpilogue;
template <Major kMajorB, template <class> class Epilogue>
ab_status launch_rows_product(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);

// GEMMs of low-rank rows (RowsProduct::thin). kMajorB: of the factor; mn as stored, k transposed.
template <Major kMajorB>
ab_status launch_thin_product(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);

// GEMMs with packed weights, which the producer decodes. Format: the type of the weights.
struct Mxfp4;
struct Fp8Blocks;
template <class Format, GateUpLayout kLayout>
ab_status launch_packed_up(const PackedUp& up, int multiprocessors, cudaStream_t stream);
template <class Format, GateUpLayout kLayout>
ab_status launch_packed_intermediate_gradient(const PackedIntermediateGradient& gradient, int multiprocessors,
                                              cudaStream_t stream);
template <class Format, Major kMajorB>
ab_status launch_packed_rows_product(const PackedRowsProduct& product, int multiprocessors, cudaStream_t stream);

// FP8 (e4m3) GEMMs with K-major weights; one tile shape.
template <GateUpLayout kLayout>
ab_status launch_fp8_up(const Fp8Up& up, int multiprocessors, cudaStream_t stream);
template <GateUpLayout kLayout>
ab_status launch_fp8_intermediate_gradient(const Fp8IntermediateGradient& gradient, int multiprocessors,
                                           cudaStream_t stream);
template <template <class> class Epilogue>
ab_status launch_fp8_rows_product(const Fp8RowsProduct& product, int multiprocessors, cudaStream_t stream);

// The operand of a weight gradient that is gathered.
enum class Gathered { nothing, x, d_y };
template <Gathered kGathered>
ab_status launch_weight_gradient(const WeightGradient& gradient, TileChoice tile, const SegmentBounds& bounds,
                                 const SegmentList& list, int multiprocessors, cudaStream_t stream);

// The operand of the gradient whose rows the thin GEMM of a FactorPair reads, too. kMajorFactor: of the factor in the
// thin GEMM, as for launch_thin_product.
enum class Paired { x, d_y };
template <Paired kPaired, Major kMajorFactor>
ab_status launch_factor_pair(const FactorPair& pair, const SegmentBounds& bounds, const SegmentList& list,
                             int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda::hopper
