// Launches weight gradients.
#pragma once

#include <type_traits>

#include "core/cuda/tensor_map.h"
#include "experts/cuda/ops/tiles/segment_tile_scheduler.cuh"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/launchers.h"
#include "experts/hopper/row_operand.cuh"
#include "experts/hopper/weight_gradient_epilogue.cuh"

namespace anabranch::cuda::hopper {

template <Gathered kGathered>
using GradientA = std::conditional_t<kGathered == Gathered::x, GatheredRowsAsK<Side::rows>, RowsAsK<Side::rows>>;
template <Gathered kGathered>
using GradientB =
    std::conditional_t<kGathered == Gathered::d_y, GatheredRowsAsK<Side::columns>, RowsAsK<Side::columns>>;

template <Side kSide>
ab_status prepare_operand(const char* name, const Floats& rows, const RowMap&, int64_t columns,
                          RowsAsK<kSide>* operand) {
  return make_row_window_map(name, rows.data, rows.dtype, columns, kPanel, kBlockK, &operand->map);
}
template <Side kSide>
ab_status prepare_operand(const char*, const Floats& rows, const RowMap& map, int64_t columns,
                          GatheredRowsAsK<kSide>* operand) {
  static_cast<GatherSource&>(*operand) = gather_source(rows, map, columns);
  return ok();
}

template <class Element>
ab_status prepare_epilogue(const WeightGradient& g, const SegmentBounds& bounds, const SegmentList& list,
                           WeightGradientEpilogue<Element>* out) {
  out->columns = static_cast<int32_t>(g.N);
  out->d_w_is_float = g.d_w.dtype == AB_FLOAT32;
  out->accumulates = g.accumulates;
  AB_RETURN_IF_ERROR(make_matrices_map("d_w", g.d_w.data, g.d_w.dtype, g.E, g.D, g.N,
                                       out->d_w_is_float ? kSubtileColumns<float> : kSubtileColumns<Element>,
                                       kSubtileRows, &out->map));
  out->partials = out->map;
  if (bounds.partials == 0) return ok();
  return make_matrices_map("partial sums", list.partials, AB_FLOAT32, bounds.partials, g.D, g.N, kSubtileColumns<float>,
                           kSubtileRows, &out->partials);
}

template <class Shape, class Element, Gathered kGathered>
ab_status launch_weight_gradient(const WeightGradient& g, const SegmentBounds& bounds, const SegmentList& list,
                                 int multiprocessors, cudaStream_t stream) {
  Product<Shape, Element, GradientA<kGathered>, GradientB<kGathered>, SegmentTiles,
          SegmentTileScheduler<Shape::kRows, Shape::kColumns>, WeightGradientEpilogue<Element>>
      product;
  // Without rows the map still needs a valid address.
  const auto with_memory = [&](const Floats& m) { return m.data == nullptr ? Floats(g.d_w.data, m.dtype) : m; };
  AB_RETURN_IF_ERROR(prepare_operand("x", with_memory(g.x), g.map, g.D, &product.a));
  AB_RETURN_IF_ERROR(prepare_operand("d_y", with_memory(g.d_y), g.map, g.N, &product.b));
  AB_RETURN_IF_ERROR(prepare_epilogue(g, bounds, list, &product.epilogue));
  const auto row_tiles = static_cast<int32_t>(ceil_div(g.D, Shape::kRows));
  const auto column_tiles = static_cast<int32_t>(ceil_div(g.N, Shape::kColumns));
  product.tiles = {list, static_cast<int32_t>(g.D), row_tiles, column_tiles};
  return launch_product("weight gradient", product, bounds.segments * row_tiles * column_tiles, multiprocessors,
                        stream);
}

template <Gathered kGathered>
ab_status launch_weight_gradient(const WeightGradient& g, TileChoice tile, const SegmentBounds& bounds,
                                 const SegmentList& list, int multiprocessors, cudaStream_t stream) {
  const auto with_element = [&]<class Element>(Element) {
    if constexpr (kGathered == Gathered::nothing) {
      if (tile == TileChoice::k128x192) {
        return launch_weight_gradient<Tile128x192, Element, kGathered>(g, bounds, list, multiprocessors, stream);
      }
    }
    if constexpr (kGathered != Gathered::d_y) {
      if (tile == TileChoice::k128x64) {
        return launch_weight_gradient<Tile128x64, Element, kGathered>(g, bounds, list, multiprocessors, stream);
      }
    }
    return tile == TileChoice::k128x128
               ? launch_weight_gradient<Tile128x128, Element, kGathered>(g, bounds, list, multiprocessors, stream)
               : launch_weight_gradient<Tile128x256, Element, kGathered>(g, bounds, list, multiprocessors, stream);
  };
  return g.x.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

}  // namespace anabranch::cuda::hopper
