// Launches the up GEMM x W_in with the activation in its epilogue.
#pragma once

#include "experts/portable/launch_product.cuh"
#include "experts/portable/launchers.h"
#include "experts/portable/up_epilogue.cuh"

namespace anabranch::cuda::portable {

// product.b.rows: the weights.
template <class P>
ab_status launch_up(P& product, const Up& up, int multiprocessors, cudaStream_t stream) {
  using Element = typename P::Element;
  const FfnSizes& s = up.s;
  const int64_t N = s.P * s.F;
  product.a.rows = matrix_rows<Element>(up.x.data, s.D, 0);
  product.a.gathered = up.map.by_slot;
  const IntermediateRowLayout layout(s);
  const bool in_parts = s.P == 2 && !layout.interleaved;
  product.b.columns = static_cast<int32_t>(in_parts ? s.F : N);
  product.b.scale = layout.interleaved ? 2 : 1;
  product.b.part_columns = in_parts ? kTileColumns / 2 : kTileColumns;
  product.b.part_step = static_cast<int32_t>(s.F);
  add_low_rank(product, up.low_rank, N, in_parts ? s.F : 0);
  auto& out = product.epilogue;
  out.h = static_cast<Element*>(up.h.data);
  out.a = static_cast<Element*>(up.a.data);
  out.bias = static_cast<const Element*>(up.b_in.data);
  product.weights = up.weights;
  out.activation = up.activation;
  out.layout = layout;
  out.aligned = are_aligned(out.a, s.F) && are_aligned(out.h, s.F) && are_aligned(out.bias, s.F);
  return launch_over_rows("up GEMM", product, groups_of(up.group_sizes, s.E, s.R, up.range), up.map, s.D, s.F,
                          kTileColumns / static_cast<int>(s.P), up.skips_rest, multiprocessors, stream);
}

template <class Element, Precision kPrecision, TileChoice kTile, bool kHasAdapter, Major kMajor>
ab_status launch_up(const Up& up, int multiprocessors, cudaStream_t stream) {
  const FfnSizes& s = up.s;
  const int64_t N = s.P * s.F;
  const bool in_parts = s.P == 2 && !s.layout.interleaved;
  MaybeAdapted<kHasAdapter, RowsProductOf<Element, kPrecision, kTile, kMajor, UpEpilogue<Element>>> product;
  product.b.rows = kMajor == Major::k ? matrix_rows<Element>(up.w_in.data, s.D, s.D * N)
                                      : matrix_rows<Element>(up.w_in.data, N, s.D * N, in_parts ? s.F : 0);
  return launch_up(product, up, multiprocessors, stream);
}

template <int32_t kDtype, Precision kPrecision, TileChoice kTile, bool kHasAdapter>
ab_status launch_up(const Up& up, int multiprocessors, cudaStream_t stream) {
  using Element = ElementOf<kDtype>;
  return up.s.layout.in_transposed
             ? launch_up<Element, kPrecision, kTile, kHasAdapter, Major::k>(up, multiprocessors, stream)
             : launch_up<Element, kPrecision, kTile, kHasAdapter, Major::mn>(up, multiprocessors, stream);
}

}  // namespace anabranch::cuda::portable
