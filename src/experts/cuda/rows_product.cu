#include "experts/cuda/clear_padding.h"
#include "experts/cuda/ops/rows_element.cuh"
#include "experts/cuda/path.h"
#include "experts/cuda/phases.h"
#include "experts/cuda/simple_product.cuh"
#include "experts/few_rows/products.h"

namespace anabranch::cuda {
namespace {

// Weights and bias, on the simple path.
struct ScaleBias {
  static constexpr int kParts = 1;
  RowsProduct p;

  __device__ __forceinline__ void operator()(const Tile& tile, const simple::Results<kParts>& results) const {
#pragma unroll
    for (int i = 0; i < simple::kEach; ++i) {
      if (i >= results.rows) continue;
      const int32_t row = results.row + i;
      const int32_t slot = tile.expert == kNoExpert ? -1 : p.map.slot_of(row);
#pragma unroll
      for (int j = 0; j < simple::kEach; ++j) {
        if (j >= results.columns) continue;
        write_rows_element(p, tile.expert, row, results.column + j, slot, results.sums[0][i][j]);
      }
    }
  }
};

SimpleProduct simple_product(const RowsProduct& p) {
  SimpleProduct product;
  product.a = {const_cast<void*>(p.x), p.dtype, 0, p.D, 1};
  const int64_t columns = p.stored_columns();
  product.b = {const_cast<void*>(p.w), p.dtype, p.D * columns, p.transposed ? 1 : columns, p.transposed ? p.D : 1};
  product.group_sizes = p.group_sizes;
  product.R = p.R;
  product.E = p.E;
  product.rows = p.R;
  product.columns = p.N;
  product.k = p.D;
  return product;
}

}  // namespace

ab_status compute_rows_product(const RowsProduct& p, const Device& device, cudaStream_t stream) {
  if (p.R * p.N == 0) return ok();
  const int multiprocessors = device.multiprocessors;
  if (few_rows::takes(p, device)) return few_rows::multiply(p, multiprocessors, stream);
  const Path path = choose_path(p, device).path;
  if (path == Path::portable) return portable::multiply(p, multiprocessors, stream);
  bool knows_padding = p.scales() || p.weighs_bias();
  if (path == Path::hopper) {
    AB_RETURN_IF_ERROR(hopper::multiply(p, hopper::choose_tile(p, multiprocessors), multiprocessors, stream));
  } else if (knows_padding || p.bias != nullptr) {
    AB_RETURN_IF_ERROR(simple::launch_rows_product(simple_product(p), ScaleBias{p}, multiprocessors, stream));
    knows_padding = true;
  } else {
    AB_RETURN_IF_ERROR(simple_rows_product(simple_product(p), {p.y, p.dtype, 0, p.N, 1}, multiprocessors, stream));
  }
  // A product without weights multiplies padding's zeros by what W holds, which may be NaN, and adds the bias.
  if (knows_padding || p.skips_rest) return ok();
  return clear_padding(p.map, {p.y, p.dtype}, p.R, p.N, multiprocessors, stream);
}

}  // namespace anabranch::cuda
