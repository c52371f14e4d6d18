#include "experts/hopper/products.h"

#include "experts/cuda/ops/row_part.h"
#include "experts/cuda/ops/tiles/segments.h"
#include "experts/hopper/launchers.h"
#include "experts/hopper/limits.h"

namespace anabranch::cuda::hopper {
namespace {

static_assert(kTileRows == kPartTileRows);

// Whether the epilogue applies row weights.
bool has_weights(const RowsProduct& p) { return p.scales() || p.weighs_bias(); }

SegmentBounds bounds_of(const WeightGradient& g) { return bound_segments(g.R, g.E, g.D, g.N); }

bool gathers_x(const WeightGradient& g) { return g.gathers_x && g.map.by_slot; }
bool gathers_d_y(const WeightGradient& g) { return g.gathers_d_y && g.map.by_slot; }

template <class Operation>
bool takes_parts(const Operation& operation, const Floats& gathered) {
  return unsupported_reason(operation) == nullptr && gathered.dtype == AB_BFLOAT16 && operation.map.by_slot &&
         gate_up_layout_of(operation.s) == GateUpLayout::gated && operation.low_rank.rank == 0;
}

}  // namespace

const char* unsupported_reason(const Up& up) {
  const FfnSizes& s = up.s;
  if (const char* reason = fused_unsupported_reason(s, up.map, up.x, {up.b_in, up.h, up.a})) return reason;
  if (!fits_tensor_map(up.w_in.data, up.w_in.dtype, s.layout.in_transposed ? s.D : s.F)) return kNotChunks;
  return fits_low_rank(up.low_rank, up.x.dtype, s.layout.in_transposed, s.F) ? nullptr : kNotRank;
}

const char* unsupported_reason(const IntermediateGradient& g) {
  if (const char* reason = fused_unsupported_reason(g.s, g.map, g.d_y, {g.h, g.dh, g.weighted_a})) return reason;
  const bool as_stored = g.s.layout.out_transposed;
  if (!fits_tensor_map(g.w_out.data, g.w_out.dtype, as_stored ? g.s.F : g.s.D)) return kNotChunks;
  return fits_low_rank(g.low_rank, g.d_y.dtype, !as_stored, g.s.F) ? nullptr : kNotRank;
}

const char* unsupported_reason(const RowsProduct& p) {
  const auto fits = [&](const void* data, int64_t columns) { return fits_tensor_map(data, p.dtype, columns); };
  if (!is_16_bit(p.dtype)) return kNot16Bit;
  const int64_t tile_columns = p.thin ? kMinThinTileColumns : kMinTileColumns;
  if (!sizes_fit({p.R, p.E, p.D, p.N}) || !tile_count_fits(p.R, p.E, p.N, tile_columns)) return kNotCounted;
  // Check y also as a window of wider rows, so that a window takes the same path as the whole.
  const bool all = fits(p.x, p.D) && fits(p.w, p.transposed ? p.D : p.stored_columns()) && fits(p.y, p.N) &&
                   fits(p.y, p.stored_columns()) && (p.bias == nullptr || fits(p.bias, p.N));
  if (!all) return kNotChunks;
  if (p.gathers_x && !fits_gather(p.map, p.D)) return kNotGathered;
  return fits_low_rank(p.low_rank, p.dtype, p.transposed, p.stored_columns()) ? nullptr : kNotRank;
}

const char* unsupported_reason(const WeightGradient& g) {
  constexpr int64_t kMaxColumns = int64_t{1} << 29;  // limited by byte offsets
  if (!is_16_bit(g.x.dtype)) return kNot16Bit;
  if (!sizes_fit({g.R, g.E, g.D, g.N}) || g.D > kMaxColumns || g.N > kMaxColumns) return kNotCounted;
  const int64_t tiles = ceil_div(g.D, kTileRows) * ceil_div(g.N, kMinThinTileColumns);
  if (tiles > kMaxCount || bounds_of(g).segments > kMaxCount / tiles) return kNotCounted;
  const auto fits = [](const Floats& m, int64_t columns) { return fits_tensor_map(m.data, m.dtype, columns); };
  if (!fits(g.x, g.D) || !fits(g.d_y, g.N) || !fits(g.d_w, g.N)) return kNotChunks;
  const bool gathers = (!gathers_x(g) || fits_gather(g.map, g.D)) && (!gathers_d_y(g) || fits_gather(g.map, g.N));
  return gathers ? nullptr : kNotGathered;
}

const char* unsupported_reason(const FactorPair& pair) {
  const char* const reason = unsupported_reason(pair.rows);
  return reason != nullptr ? reason : unsupported_reason(pair.gradient);
}

bool takes_parts(const Up& up) { return takes_parts(up, up.x); }
bool takes_parts(const IntermediateGradient& g) { return takes_parts(g, g.d_y); }

TileChoice choose_tile(const Up& up, int multiprocessors) {
  const FfnSizes& s = up.s;
  return choose_fused_tile(s.R, s.E, s.P * s.F, s.D, multiprocessors).choice;
}

TileChoice choose_tile(const RowsProduct& p, int multiprocessors) {
  if (p.thin) return choose_thin_tile(p.N);
  return (has_weights(p) ? choose_fused_tile(p.R, p.E, p.N, p.D, multiprocessors)
                         : choose_row_tile(p.R, p.E, p.N, p.D, p.transposed, multiprocessors))
      .choice;
}

TileChoice choose_tile(const IntermediateGradient& g, int multiprocessors) {
  return choose_fused_tile(g.s.R, g.s.E, g.s.F, g.s.D, multiprocessors).choice;
}

TileChoice choose_tile(const WeightGradient& g, int multiprocessors) {
  if (g.N <= kMinThinTileColumns && !gathers_d_y(g)) return choose_thin_tile(g.N);
  return choose_weight_tile(g.R, g.E, g.D, g.N, gathers_x(g) || gathers_d_y(g), multiprocessors).choice;
}

int64_t num_dot_parts(const IntermediateGradient& g) { return ceil_div(g.s.F, kDotColumns); }

ab_status launch_gemm(const Up& up, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  const bool transposed = up.s.layout.in_transposed;
  if (up.part.bounds != nullptr) {
    return (transposed ? launch_part_of_up<Major::k> : launch_part_of_up<Major::mn>)(up, tile, multiprocessors, stream);
  }
  const auto with_layout = [&]<GateUpLayout kLayout>() {
    return (transposed ? launch_up<kLayout, Major::k> : launch_up<kLayout, Major::mn>)(up, tile, multiprocessors,
                                                                                       stream);
  };
  return with_gate_up_layout(up.s, with_layout);
}

ab_status launch_gemm(const RowsProduct& p, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  if (p.thin) {
    return (p.transposed ? launch_thin_product<Major::k> : launch_thin_product<Major::mn>)(p, tile, multiprocessors,
                                                                                           stream);
  }
  const auto with_epilogue = [&]<template <class> class Epilogue>() {
    return (p.transposed ? launch_rows_product<Major::k, Epilogue>
                         : launch_rows_product<Major::mn, Epilogue>)(p, tile, multiprocessors, stream);
  };
  return has_weights(p) ? with_epilogue.template operator()<ScaleBiasEpilogue>()
                        : with_epilogue.template operator()<RowsEpilogue>();
}

ab_status launch_gemm(const IntermediateGradient& g, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  const bool as_stored = g.s.layout.out_transposed;
  if (g.part.bounds != nullptr) {
    return (as_stored ? launch_part_of_intermediate_gradient<Major::mn>
                      : launch_part_of_intermediate_gradient<Major::k>)(g, tile, multiprocessors, stream);
  }
  const auto with_layout = [&]<GateUpLayout kLayout>() {
    return (as_stored ? launch_intermediate_gradient<kLayout, Major::mn>
                      : launch_intermediate_gradient<kLayout, Major::k>)(g, tile, multiprocessors, stream);
  };
  return with_gate_up_layout(g.s, with_layout);
}

ab_status launch_gemm(const WeightGradient& g, TileChoice tile, void* workspace, int multiprocessors,
                      cudaStream_t stream) {
  const auto launch = gathers_x(g)     ? launch_weight_gradient<Gathered::x>
                      : gathers_d_y(g) ? launch_weight_gradient<Gathered::d_y>
                                       : launch_weight_gradient<Gathered::nothing>;
  return sum_in_segments(g, workspace, multiprocessors, stream,
                         [&](const SegmentBounds& bounds, const SegmentList& list) {
                           return launch(g, tile, bounds, list, multiprocessors, stream);
                         });
}

ab_status launch_gemm(const FactorPair& pair, void* workspace, int multiprocessors, cudaStream_t stream) {
  const WeightGradient& g = pair.gradient;
  const auto with_rows = [&]<Paired kPaired>() {
    return pair.rows.transposed ? launch_factor_pair<kPaired, Major::k> : launch_factor_pair<kPaired, Major::mn>;
  };
  const auto launch = pair.rows.x == g.x.data ? with_rows.template operator()<Paired::x>()
                                              : with_rows.template operator()<Paired::d_y>();
  return sum_in_segments(g, workspace, multiprocessors, stream,
                         [&](const SegmentBounds& bounds, const SegmentList& list) {
                           return launch(pair, bounds, list, multiprocessors, stream);
                         });
}

}  // namespace anabranch::cuda::hopper
