// Launches weight gradients.
#pragma once

#include "experts/cuda/ops/tiles/segment_tile_scheduler.cuh"
#include "experts/portable/launch_product.cuh"
#include "experts/portable/launchers.h"
#include "experts/portable/weight_gradient_epilogue.cuh"

namespace anabranch::cuda::portable {

template <int32_t kDtype, Precision kPrecision, TileChoice kTile>
ab_status launch_weight_gradient(const WeightGradient& g, const SegmentBounds& bounds, const SegmentList& list,
                                 int multiprocessors, cudaStream_t stream) {
  using Element = ElementOf<kDtype>;
  using Shape = TileOf<Element, kPrecision, kTile>;
  Product<Shape, Element, kPrecision, SumOperand<Side::rows>, SumOperand<Side::columns>, SegmentTiles,
          SegmentTileScheduler<Shape::kRows, 1>, WeightGradientEpilogue<Element>>
      product;
  const auto prepare = [&](auto& operand, const Floats& rows, bool gathered, int64_t columns) {
    operand.rows = matrix_rows<Element>(rows.data, columns, 0);
    operand.map = g.map;
    operand.gathered = gathered && g.map.by_slot;
    operand.columns = static_cast<int32_t>(columns);
  };
  prepare(product.a, g.x, g.gathers_x, g.D);
  prepare(product.b, g.d_y, g.gathers_d_y, g.N);
  auto& out = product.epilogue;
  out.d_w = g.d_w.data;
  out.partials = list.partials;
  out.rows = static_cast<int32_t>(g.D);
  out.columns = static_cast<int32_t>(g.N);
  out.d_w_is_float = g.d_w.dtype == AB_FLOAT32;
  out.accumulates = g.accumulates;
  out.aligned = out.d_w_is_float ? are_aligned(static_cast<const float*>(g.d_w.data), g.N)
                                 : are_aligned(static_cast<const Element*>(g.d_w.data), g.N);
  const auto row_tiles = static_cast<int32_t>(tiles_of(g.D, Shape::kRows));
  const auto column_tiles = static_cast<int32_t>(tiles_of(g.N, kTileColumns));
  product.tiles = {list, static_cast<int32_t>(g.D), row_tiles, column_tiles};
  product.tile_columns = kTileColumns;
  return launch_product("weight gradient", product, bounds.segments * row_tiles * column_tiles, multiprocessors,
                        stream);
}

}  // namespace anabranch::cuda::portable
