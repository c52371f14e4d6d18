#include "experts/portable/products.h"

#include <initializer_list>

#include "core/tensor.h"
#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"
#include "experts/cuda/ops/tiles/segments.h"
#include "experts/portable/launchers.h"
#include "experts/portable/tile_choice.h"

namespace anabranch::cuda::portable {
namespace {

// Of rows, of what is contracted or of columns with a tile more, and of tiles: what kernels count in int32, and bytes
// of a row in uint32.
constexpr int64_t kMostIndices = (int64_t{1} << 30) - 1;

const char* why_not_counted(std::initializer_list<int64_t> sizes) {
  for (const int64_t size : sizes) {
    if (size > kMostIndices) return "2^30 rows, columns or tiles, or more";
  }
  return nullptr;
}

const char* why_not_one_dtype(int32_t dtype, std::initializer_list<Floats> others) {
  for (const Floats& other : others) {
    if (other.data != nullptr && other.dtype != dtype) return "dtypes differ";
  }
  return nullptr;
}

int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// With the narrowest tiles of a product over rows.
int64_t tiles_over_rows(int64_t R, int64_t E, int64_t columns) {
  return most_row_tiles(R, E, SmallTile::kRows) * tiles_of(columns, kTileColumns / 2);
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

// Calls f.template operator()<kDtype, kPrecision, kTile>() for products over rows.
template <class F>
ab_status with_kernel(int32_t dtype, Precision precision, int64_t R, int64_t E, int64_t columns, int multiprocessors,
                      const F& f) {
  const TileChoice tile = choose_tile(R, E, columns, multiprocessors, static_cast<int>(dtype_size(dtype)), precision);
  return with_elements(dtype, precision, [&]<int32_t kDtype, Precision kPrecision>() {
    return tile == TileChoice::small ? f.template operator()<kDtype, kPrecision, TileChoice::small>()
                                     : f.template operator()<kDtype, kPrecision, TileChoice::main>();
  });
}

}  // namespace

const char* why_not(const Up& up) {
  const FfnSizes& s = up.s;
  if (const char* why = why_not_counted({s.R, s.E, s.D, s.P * s.F, tiles_over_rows(s.R, s.E, s.F)})) return why;
  return why_not_one_dtype(up.x.dtype, {up.w_in, up.b_in, up.h, up.a});
}

const char* why_not(const RowsProduct& p) {
  return why_not_counted({p.R, p.E, p.D, p.stored_columns(), tiles_over_rows(p.R, p.E, p.N)});
}

const char* why_not(const HiddenGradient& g) {
  const FfnSizes& s = g.s;
  if (const char* why = why_not_counted({s.R, s.E, s.D, s.P * s.F, tiles_over_rows(s.R, s.E, s.F)})) return why;
  return why_not_one_dtype(g.d_y.dtype, {g.w_out, g.h, g.dh, g.weighted_a});
}

const char* why_not(const WeightGradient& g) {
  if (const char* why = why_not_counted({g.R, g.E, g.D, g.N})) return why;
  const int64_t tiles = tiles_of(g.D, SplitTile::kRows) * tiles_of(g.N, kTileColumns);
  if (tiles > kMostIndices || bounds_of(g).segments > kMostIndices / std::max<int64_t>(tiles, 1)) {
    return why_not_counted({kMostIndices + 1});
  }
  if (g.x.dtype != g.d_y.dtype) return "dtypes differ";
  const bool wide = g.d_w.dtype == AB_FLOAT32;
  if (!wide && g.accumulates) return "only float32 accumulates";
  return wide || g.d_w.dtype == g.x.dtype ? nullptr : "dtypes differ";
}

int64_t parts_of_dots(const HiddenGradient& g) { return tiles_of(g.s.F, kTileColumns); }

ab_status multiply(const Up& up, int multiprocessors, cudaStream_t stream) {
  return with_kernel(up.x.dtype, up.precision, up.s.R, up.s.E, up.s.P * up.s.F, multiprocessors,
                     [&]<int32_t kDtype, Precision kPrecision, TileChoice kTile>() {
                       return launch_up<kDtype, kPrecision, kTile>(up, multiprocessors, stream);
                     });
}

ab_status multiply(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  return with_kernel(p.dtype, p.precision, p.R, p.E, p.N, multiprocessors,
                     [&]<int32_t kDtype, Precision kPrecision, TileChoice kTile>() {
                       return launch_rows_product<kDtype, kPrecision, kTile>(p, multiprocessors, stream);
                     });
}

ab_status multiply(const HiddenGradient& g, int multiprocessors, cudaStream_t stream) {
  return with_kernel(g.h.dtype, g.precision, g.s.R, g.s.E, g.s.F, multiprocessors,
                     [&]<int32_t kDtype, Precision kPrecision, TileChoice kTile>() {
                       return launch_hidden_gradient<kDtype, kPrecision, kTile>(g, multiprocessors, stream);
                     });
}

ab_status multiply(const WeightGradient& g, void* workspace, int multiprocessors, cudaStream_t stream) {
  const SegmentBounds bounds = bounds_of(g);
  const SegmentList list = place_segments(bounds, workspace);
  AB_RETURN_IF_ERROR(find_segments(groups_of(g.group_sizes, g.E, g.R), bounds, list, stream));
  AB_RETURN_IF_ERROR(with_elements(g.x.dtype, g.precision, [&]<int32_t kDtype, Precision kPrecision>() {
    return launch_weight_gradient<kDtype, kPrecision, TileChoice::main>(g, bounds, list, multiprocessors, stream);
  }));
  if (bounds.partials == 0) return ok();
  return add_partials(list, g.D * g.N, g.d_w.data, g.d_w.dtype, g.accumulates, multiprocessors, stream);
}

}  // namespace anabranch::cuda::portable
