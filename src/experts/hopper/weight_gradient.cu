#include "experts/hopper/weight_gradient.cuh"

namespace anabranch::cuda {
namespace {

SegmentBounds bounds_of(const WeightGradient& g) { return bound_segments(g.R, g.E, g.D, g.N); }

}  // namespace

bool runs_on_tensor_cores(const WeightGradient& g, bool addresses) {
  constexpr int64_t kMostIndices = int64_t{1} << 30;  // of rows and of tiles
  constexpr int64_t kMostColumns = int64_t{1} << 29;  // of which offsets in bytes are counted
  static_assert(kMostIndices <= kMostWindowRows);
  const bool sizes = g.R > 0 && g.E > 0 && g.D > 0 && g.N > 0 && g.R <= kMostIndices && g.E <= kMostIndices &&
                     g.D <= kMostColumns && g.N <= kMostColumns;
  if (!sizes || (g.dtype != AB_BFLOAT16 && g.dtype != AB_FLOAT16)) return false;
  if (g.d_w_dtype != AB_FLOAT32 && (g.d_w_dtype != g.dtype || g.accumulates)) return false;
  const int64_t tiles = (g.D + 127) / 128 * ((g.N + 127) / 128);
  if (tiles > kMostIndices || bounds_of(g).segments > kMostIndices / tiles) return false;
  const auto fits = [&](const void* data, int32_t dtype, int64_t columns) {
    return fits_tensor_map(addresses ? data : nullptr, dtype, columns);
  };
  return fits(g.x.data, g.dtype, g.D) && fits(g.d_y.data, g.dtype, g.N) && fits(g.d_w, g.d_w_dtype, g.N) &&
         fits_gather(g.x, g.D) && fits_gather(g.d_y, g.N);
}

size_t workspace_of(const WeightGradient& g) { return size_of_segments(bounds_of(g), g.D, g.N); }

ab_status multiply_terms(const WeightGradient& g, TileChoice tile, void* workspace, int multiprocessors,
                         cudaStream_t stream) {
  const SegmentBounds bounds = bounds_of(g);
  const SegmentList list = place_segments(bounds, workspace);
  AB_RETURN_IF_ERROR(
      find_segments({g.group_sizes, static_cast<int32_t>(g.E), static_cast<int32_t>(g.R)}, bounds, list, stream));
  const auto multiply = g.x.slots != nullptr     ? multiply_gathered_x
                        : g.d_y.slots != nullptr ? multiply_gathered_d_y
                                                 : multiply_row_terms;
  AB_RETURN_IF_ERROR(multiply(g, tile, bounds, list, multiprocessors, stream));
  if (bounds.partials == 0) return ok();
  return add_partials(list, g.D * g.N, g.d_w, g.d_w_dtype, g.accumulates, multiprocessors, stream);
}

ab_status multiply_terms(const WeightGradient& g, void* workspace, int multiprocessors, cudaStream_t stream) {
  const bool gathers = g.x.slots != nullptr || g.d_y.slots != nullptr;
  const TileChoice tile = choose_weight_tile(g.R, g.E, g.D, g.N, gathers, multiprocessors).choice;
  return multiply_terms(g, tile, workspace, multiprocessors, stream);
}

}  // namespace anabranch::cuda
