// Launches GEMMs over rows.
#pragma once

#include "experts/portable/launch_product.cuh"
#include "experts/portable/launchers.h"
#include "experts/portable/rows_epilogue.cuh"

namespace anabranch::cuda::portable {

// product.b.rows: the weights.
template <class P>
ab_status launch_rows_product(P& product, const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  using Element = typename P::Element;
  const int64_t stored = p.stored_columns();
  product.a.rows = matrix_rows<Element>(p.x, p.D, 0);
  product.a.gathered = p.gathers_x && p.map.by_slot;
  product.b.columns = static_cast<int32_t>(p.N);
  product.b.part_columns = kTileColumns;
  add_low_rank(product, p.low_rank, stored);
  auto& out = product.epilogue;
  out.y = static_cast<Element*>(p.y);
  out.bias = static_cast<const Element*>(p.bias);
  out.bias_columns = stored;
  product.weights = p.weights;
  out.weight_early = p.weight_early;
  out.factor = p.factor;
  out.y_aligned = are_aligned(out.y, p.N);
  out.bias_aligned = are_aligned(out.bias, stored);
  out.columns = static_cast<int32_t>(p.N);
  return launch_over_rows("grouped GEMM", product, groups_of(p.group_sizes, p.E, p.R, p.range), p.map, p.D, p.N,
                          kTileColumns, p.skips_rest, multiprocessors, stream);
}

template <class Element, Precision kPrecision, TileChoice kTile, bool kHasAdapter, Major kMajor>
ab_status launch_rows_product(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  MaybeAdapted<kHasAdapter, RowsProductOf<Element, kPrecision, kTile, kMajor, RowsEpilogue<Element>>> product;
  const int64_t stored = p.stored_columns();
  product.b.rows = matrix_rows<Element>(p.w, kMajor == Major::k ? p.D : stored, p.shared_w ? 0 : p.D * stored);
  return launch_rows_product(product, p, multiprocessors, stream);
}

template <int32_t kDtype, Precision kPrecision, TileChoice kTile, bool kHasAdapter>
ab_status launch_rows_product(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  using Element = ElementOf<kDtype>;
  return p.transposed
             ? launch_rows_product<Element, kPrecision, kTile, kHasAdapter, Major::k>(p, multiprocessors, stream)
             : launch_rows_product<Element, kPrecision, kTile, kHasAdapter, Major::mn>(p, multiprocessors, stream);
}

}  // namespace anabranch::cuda::portable
