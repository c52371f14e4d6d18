// Launches the gradient of the intermediate rows: d_y W_out^T, with the activation's derivative in the epilogue.
#pragma once

#include "experts/portable/intermediate_gradient_epilogue.cuh"
#include "experts/portable/launch_product.cuh"
#include "experts/portable/launchers.h"

namespace anabranch::cuda::portable {

// product.b.rows: the weights.
template <class P>
ab_status launch_intermediate_gradient(P& product, const IntermediateGradient& g, int multiprocessors,
                                       cudaStream_t stream) {
  using Element = typename P::Element;
  const FfnSizes& s = g.s;
  product.a.rows = matrix_rows<Element>(g.d_y.data, s.D, 0);
  product.a.gathered = g.map.by_slot;
  product.b.columns = static_cast<int32_t>(s.F);
  product.b.part_columns = kTileColumns;
  add_low_rank(product, g.low_rank, s.F);
  auto& out = product.epilogue;
  out.h = static_cast<const Element*>(g.h.data);
  out.dh = static_cast<Element*>(g.dh.data);
  out.weighted_a = static_cast<Element*>(g.weighted_a.data);
  out.dots = g.dots;
  product.weights = g.weights;
  out.activation = g.activation;
  out.layout = IntermediateRowLayout(s);
  out.R = static_cast<int32_t>(s.R);
  out.aligned = are_aligned(out.h, s.F) && are_aligned(out.dh, s.F) && are_aligned(out.weighted_a, s.F);
  return launch_over_rows("intermediate gradient", product, groups_of(g.group_sizes, s.E, s.R, g.range), g.map, s.D,
                          s.F, kTileColumns, g.skips_rest, multiprocessors, stream);
}

template <class Element, Precision kPrecision, TileChoice kTile, bool kHasAdapter, Major kMajor>
ab_status launch_intermediate_gradient(const IntermediateGradient& g, int multiprocessors, cudaStream_t stream) {
  const FfnSizes& s = g.s;
  MaybeAdapted<kHasAdapter, RowsProductOf<Element, kPrecision, kTile, kMajor, IntermediateGradientEpilogue<Element>>>
      product;
  product.b.rows = matrix_rows<Element>(g.w_out.data, kMajor == Major::k ? s.D : s.F, s.D * s.F);
  return launch_intermediate_gradient(product, g, multiprocessors, stream);
}

// W_out [E, F, D] is operand B, transposed: its rows have D elements.
template <int32_t kDtype, Precision kPrecision, TileChoice kTile, bool kHasAdapter>
ab_status launch_intermediate_gradient(const IntermediateGradient& g, int multiprocessors, cudaStream_t stream) {
  using Element = ElementOf<kDtype>;
  return g.s.layout.out_transposed ? launch_intermediate_gradient<Element, kPrecision, kTile, kHasAdapter, Major::mn>(
                                         g, multiprocessors, stream)
                                   : launch_intermediate_gradient<Element, kPrecision, kTile, kHasAdapter, Major::k>(
                                         g, multiprocessors, stream);
}

}  // namespace anabranch::cuda::portable
