// Launches gradients of weights; compiled once for each factor whose rows may stand elsewhere.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/cuda/tensor_map.h"
#include "experts/hopper/gathered.cuh"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/segment_tiles.cuh"
#include "experts/hopper/weight_gradient.h"

namespace anabranch::cuda {

// What of a gradient is gathered.
enum class Gathered { nothing, x, d_y };

template <Gathered kGathered>
using GradientA = std::conditional_t<kGathered == Gathered::x, GatheredTerms<Side::rows>, Terms<Side::rows>>;
template <Gathered kGathered>
using GradientB = std::conditional_t<kGathered == Gathered::d_y, GatheredTerms<Side::columns>, Terms<Side::columns>>;

template <class Shape, class Element, Gathered kGathered>
using GradientOf = Product<Shape, Element, GradientA<kGathered>, GradientB<kGathered>, SegmentGroups,
                           SegmentTiles<Shape::kRows, Shape::kColumns>, WeightsOut<Element>>;

template <Side kSide>
ab_status prepare_terms(const char* name, const RowSource& rows, int32_t dtype, int64_t columns, Terms<kSide>* terms) {
  return make_row_window_map(name, rows.data, dtype, columns, kPanel, kStepTerms, &terms->map);
}
template <Side kSide>
ab_status prepare_terms(const char*, const RowSource& rows, int32_t, int64_t columns, GatheredTerms<kSide>* terms) {
  static_cast<RowsElsewhere&>(*terms) = rows_elsewhere(rows, columns);
  return ok();
}

template <class Shape, class Element, Gathered kGathered>
ab_status launch_terms(const WeightGradient& g, const SegmentBounds& bounds, const SegmentList& list,
                       int multiprocessors, cudaStream_t stream) {
  GradientOf<Shape, Element, kGathered> product;
  AB_RETURN_IF_ERROR(prepare_terms("x", g.x, g.dtype, g.D, &product.a));
  AB_RETURN_IF_ERROR(prepare_terms("d_y", g.d_y, g.dtype, g.N, &product.b));
  product.out.columns = static_cast<int32_t>(g.N);
  product.out.wide = g.d_w_dtype == AB_FLOAT32;
  product.out.adds = g.accumulates;
  AB_RETURN_IF_ERROR(make_matrices_map("d_w", g.d_w, g.d_w_dtype, g.E, g.D, g.N,
                                       product.out.wide ? kStripColumns<float> : kStripColumns<Element>, kStripRows,
                                       &product.out.map));
  product.out.partials = product.out.map;
  if (bounds.partials > 0) {
    AB_RETURN_IF_ERROR(make_matrices_map("partial results", list.partials, AB_FLOAT32, bounds.partials, g.D, g.N,
                                         kStripColumns<float>, kStripRows, &product.out.partials));
  }
  const auto row_tiles = static_cast<int32_t>((g.D + Shape::kRows - 1) / Shape::kRows);
  const auto column_tiles = static_cast<int32_t>((g.N + Shape::kColumns - 1) / Shape::kColumns);
  product.groups = {list, static_cast<int32_t>(g.D), row_tiles, column_tiles};
  return launch_product("weight gradient", product, bounds.segments * row_tiles * column_tiles, multiprocessors,
                        stream);
}

template <Gathered kGathered>
ab_status launch_terms(const WeightGradient& g, TileChoice tile, const SegmentBounds& bounds, const SegmentList& list,
                       int multiprocessors, cudaStream_t stream) {
  const auto with_element = [&]<class Element>(Element) {
    if constexpr (kGathered == Gathered::nothing) {
      if (tile == TileChoice::k128x192) {
        return launch_terms<Tile128x192, Element, kGathered>(g, bounds, list, multiprocessors, stream);
      }
    }
    return tile == TileChoice::k128x128
               ? launch_terms<Tile128x128, Element, kGathered>(g, bounds, list, multiprocessors, stream)
               : launch_terms<Tile128x256, Element, kGathered>(g, bounds, list, multiprocessors, stream);
  };
  return g.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

// In weight_gradient_rows.cu, weight_gradient_gather_x.cu and weight_gradient_gather_d_y.cu.
ab_status multiply_row_terms(const WeightGradient& gradient, TileChoice tile, const SegmentBounds& bounds,
                             const SegmentList& list, int multiprocessors, cudaStream_t stream);
ab_status multiply_gathered_x(const WeightGradient& gradient, TileChoice tile, const SegmentBounds& bounds,
                              const SegmentList& list, int multiprocessors, cudaStream_t stream);
ab_status multiply_gathered_d_y(const WeightGradient& gradient, TileChoice tile, const SegmentBounds& bounds,
                                const SegmentList& list, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
