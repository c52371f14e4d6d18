// Shared code of the FP8 (e4m3) launchers. Tensor maps and k are counted in pairs of elements.
#pragma once

#include "core/cuda/tensor_map.h"
#include "experts/cuda/ops/fp8.h"
#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/launchers.h"
#include "experts/hopper/limits.h"
#include "experts/hopper/low_rank.cuh"
#include "experts/hopper/row_operand.cuh"
#include "experts/hopper/scaled_mainloop.cuh"

namespace anabranch::cuda::hopper {

using Fp8Shape = InPairs<Tile128x256>;
static_assert(Fp8Shape::kColumns == kFp8TileColumns, "limits.h has the width of the FP8 tile");

inline Floats pairs_of(const Fp8Rows& rows) { return {const_cast<void*>(rows.values), kPairDtype}; }

// Prepares an operand with rows of `columns` elements in expert order.
inline ab_status prepare_fp8_rows(const char* name, const Fp8Rows& rows, int64_t R, int64_t columns,
                                  ScaledRows<RowOperand>* operand) {
  operand->scales = {rows.scales, nullptr, Divisor(1), static_cast<int32_t>(R),
                     static_cast<int32_t>(columns / kScaleBlock)};
  return prepare_rows<Fp8Shape::kRows>(name, pairs_of(rows), {}, columns / 2, static_cast<RowOperand*>(operand));
}
// Prepares an operand with gathered rows, or with rows in expert order if the map has no assignments. Padding rows read
// the scales of the first row. If there are no rows, they read scales of w instead, which has enough of them.
inline ab_status gather_fp8_rows(const char* name, const Fp8Rows& rows, const Fp8Weights& w, const RowMap& map,
                                 int64_t columns, ScaledRows<GatheredRowOperand>* operand) {
  const float* scales = map.sources() == 0 ? w.scales : rows.scales;
  operand->scales = {scales, map.slots, map.by_topk, map.sources(), static_cast<int32_t>(columns / kScaleBlock)};
  return prepare_rows<Fp8Shape::kRows>(name, pairs_of(rows), map, columns / 2,
                                       static_cast<GatheredRowOperand*>(operand));
}

// gated: the halves of a tile are gate and up columns; else adjacent columns.
inline WeightScales scales_of(const Fp8Weights& w, bool gated) {
  WeightScales scales;
  scales.scales = w.scales;
  scales.expert_stride = static_cast<uint32_t>(w.expert_stride);
  scales.k_stride = static_cast<uint32_t>(w.k_stride);
  scales.column_stride = static_cast<uint32_t>(w.column_stride);
  scales.half_stride = static_cast<uint32_t>(gated ? w.part_stride : w.column_stride);
  scales.last = static_cast<uint32_t>(w.count - 1);
  return scales;
}

// Makes the tensor map of the weights with `count` columns from `column` on, in E matrices of `expert_columns` columns
// each.
inline ab_status make_fp8_weights_map(const char* name, const Fp8Weights& w, int64_t E, int64_t column, int64_t count,
                                      int64_t expert_columns, int64_t k, int box_columns, CUtensorMap* map) {
  return make_matrices_map(name, static_cast<const char*>(w.values) + column * k, kPairDtype, E, count, k / 2, kPanel,
                           box_columns, map, k / 2, expert_columns);
}

// Operand B. The factor of a low-rank term has 16-bit elements and is K-major, like the weights. Layers without
// adapters have kernels of their own: code for the term makes gathering kernels up to 10% slower, also where it does
// not run.
template <class Weights, bool kHasAdapter>
using Fp8OperandB =
    std::conditional_t<kHasAdapter, LowRankOperand<ScaledWeights<Weights>, Weights>, ScaledWeights<Weights>>;

template <class P>
ab_status launch_fp8_product(const char* name, P* product, const int32_t* group_sizes, int64_t R, int64_t E, int64_t k,
                             int64_t column_tiles, bool skips_rest, int multiprocessors, cudaStream_t stream) {
  product->tiles = {groups_of(group_sizes, E, R), static_cast<int32_t>(k / 2), static_cast<int32_t>(column_tiles),
                    skips_rest};
  return launch_product(name, *product, max_group_row_tiles(R, E, P::Shape::kRows) * column_tiles, multiprocessors,
                        stream);
}

}  // namespace anabranch::cuda::hopper
