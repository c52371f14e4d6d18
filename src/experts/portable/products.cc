#include "experts/portable/products.h"

#include <cstdint>

#include "core/tensor.h"
#include "experts/cuda/ops/counts.h"
#include "experts/cuda/ops/tiles/groups.h"
#include "experts/cuda/ops/tiles/segments.h"
#include "experts/portable/launchers.h"
#include "experts/portable/tile_choice.h"

namespace anabranch::cuda::portable {
namespace {

int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// Number of tiles of a GEMM over rows with the smallest tiles.
int64_t tiles_over_rows(int64_t R, int64_t E, int64_t columns) {
  return max_group_row_tiles(R, E, SmallTile::kRows) * tiles_of(columns, kTileColumns / 2);
}

SegmentBounds bounds_of(const WeightGradient& g) { return bound_segments(g.R, g.E, g.D, g.N); }

// Calls f.template operator()<kDtype, kPrecision>().
template <class F>
ab_status with_elements(int32_t dtype, Precision precision, const F& f) {
  switch (dtype) {
    case AB_BFLOAT16: return f.template operator()<AB_BFLOAT16, Precision::highest>();
    case AB_FLOAT16: return f.template operator()<AB_FLOAT16, Precision::highest>();
    default:
      return precision == Precision::tf32 ? f.template operator()<AB_FLOAT32, Precision::tf32>()
                                          : f.template operator()<AB_FLOAT32, Precision::highest>();
  }
}

// Calls f.template operator()<kDtype, kPrecision, kTile, kHasAdapter>() for GEMMs over rows. With an adapter there is
// only the main tile, so that there are fewer kernels.
template <class F>
ab_status with_kernel(int32_t dtype, Precision precision, const LowRank& low_rank, int64_t R, int64_t E,
                      int64_t columns, int multiprocessors, const F& f) {
  if (low_rank.rank > 0) {
    return with_elements(dtype, precision, [&]<int32_t kDtype, Precision kPrecision>() {
      return f.template operator()<kDtype, kPrecision, TileChoice::main, true>();
    });
  }
  const TileChoice tile = choose_tile(R, E, columns, multiprocessors, static_cast<int>(dtype_size(dtype)), precision);
  return with_elements(dtype, precision, [&]<int32_t kDtype, Precision kPrecision>() {
    return tile == TileChoice::small ? f.template operator()<kDtype, kPrecision, TileChoice::small, false>()
                                     : f.template operator()<kDtype, kPrecision, TileChoice::main, false>();
  });
}

}  // namespace

ab_status check(const Up& up) {
  const FfnSizes& s = up.s;
  return check_counts({{"R", s.R},
                       {"E", s.E},
                       {"D", s.D},
                       {"columns of w_in", s.P * s.F},
                       {"rank of the adapter", up.low_rank.rank},
                       {"tiles of h", tiles_over_rows(s.R, s.E, s.F)}});
}

ab_status check(const RowsProduct& p) {
  return check_counts({{"R", p.R},
                       {"E", p.E},
                       {"rows of w", p.D},
                       {"columns of w", p.stored_columns()},
                       {"rank of the adapter", p.low_rank.rank},
                       {"tiles of y", tiles_over_rows(p.R, p.E, p.N)}});
}

ab_status check(const IntermediateGradient& g) {
  const FfnSizes& s = g.s;
  return check_counts({{"R", s.R},
                       {"E", s.E},
                       {"D", s.D},
                       {"columns of w_in", s.P * s.F},
                       {"rank of the adapter", g.low_rank.rank},
                       {"tiles of dh", tiles_over_rows(s.R, s.E, s.F)}});
}

ab_status check(const WeightGradient& g) {
  AB_RETURN_IF_ERROR(check_counts({{"R", g.R}, {"E", g.E}, {"rows of d_w", g.D}, {"columns of d_w", g.N}}));
  const int64_t tiles = tiles_of(g.D, SplitTile::kRows) * tiles_of(g.N, kTileColumns);
  int64_t all_tiles = 0;
  if (__builtin_mul_overflow(tiles, bounds_of(g).segments, &all_tiles)) all_tiles = INT64_MAX;
  return check_counts({{"tiles of d_w", all_tiles}});
}

int64_t num_dot_parts(const IntermediateGradient& g) { return tiles_of(g.s.F, kTileColumns); }

ab_status launch_gemm(const Up& up, int multiprocessors, cudaStream_t stream) {
  AB_RETURN_IF_ERROR(check(up));
  return with_kernel(up.x.dtype, up.precision, up.low_rank, up.s.R, up.s.E, up.s.P * up.s.F, multiprocessors,
                     [&]<int32_t kDtype, Precision kPrecision, TileChoice kTile, bool kHasAdapter>() {
                       return launch_up<kDtype, kPrecision, kTile, kHasAdapter>(up, multiprocessors, stream);
                     });
}

ab_status launch_gemm(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  AB_RETURN_IF_ERROR(check(p));
  return with_kernel(p.dtype, p.precision, p.low_rank, p.R, p.E, p.N, multiprocessors,
                     [&]<int32_t kDtype, Precision kPrecision, TileChoice kTile, bool kHasAdapter>() {
                       return launch_rows_product<kDtype, kPrecision, kTile, kHasAdapter>(p, multiprocessors, stream);
                     });
}

ab_status launch_gemm(const IntermediateGradient& g, int multiprocessors, cudaStream_t stream) {
  AB_RETURN_IF_ERROR(check(g));
  return with_kernel(g.h.dtype, g.precision, g.low_rank, g.s.R, g.s.E, g.s.F, multiprocessors,
                     [&]<int32_t kDtype, Precision kPrecision, TileChoice kTile, bool kHasAdapter>() {
                       return launch_intermediate_gradient<kDtype, kPrecision, kTile, kHasAdapter>(g, multiprocessors,
                                                                                                   stream);
                     });
}

ab_status launch_gemm(const WeightGradient& g, void* workspace, int multiprocessors, cudaStream_t stream) {
  AB_RETURN_IF_ERROR(check(g));
  return sum_in_segments(
      g, workspace, multiprocessors, stream, [&](const SegmentBounds& bounds, const SegmentList& list) {
        return with_elements(g.x.dtype, g.precision, [&]<int32_t kDtype, Precision kPrecision>() {
          return launch_weight_gradient<kDtype, kPrecision, TileChoice::main>(g, bounds, list, multiprocessors, stream);
        });
      });
}

}  // namespace anabranch::cuda::portable
