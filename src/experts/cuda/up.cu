#include "experts/cuda/ops/up_element.cuh"
#include "experts/cuda/path.h"
#include "experts/cuda/phases.h"
#include "experts/cuda/simple_product.cuh"
#include "experts/few_rows/products.h"

namespace anabranch::cuda {
namespace {

// Gate and up of the same columns; ungated, gate alone.
template <int kParts_>
struct Activate {
  static constexpr int kParts = kParts_;
  Up up;

  __device__ __forceinline__ void operator()(const Tile& tile, const simple::Results<kParts>& results) const {
#pragma unroll
    for (int i = 0; i < simple::kEach; ++i) {
      if (i >= results.rows) continue;
      const int32_t row = results.row + i;
      const int32_t slot = tile.expert == kNoExpert ? -1 : up.map.slot_of(row);
#pragma unroll
      for (int j = 0; j < simple::kEach; ++j) {
        if (j >= results.columns) continue;
        write(tile.expert, row, results.column + j, slot, results.sums[0][i][j], results.sums[kParts - 1][i][j]);
      }
    }
  }

  // Out of line, or copies of it were most of the kernel's code.
  __device__ __noinline__ void write(int32_t expert, int64_t row, int64_t column, int32_t slot, float gate,
                                     float other) const {
    write_up(up, expert, row, column, slot, gate, other);
  }
};

}  // namespace

ab_status compute_up(const Up& up, const Device& device, cudaStream_t stream) {
  const FfnSizes& s = up.s;
  if (s.R * s.F == 0) return ok();
  const int multiprocessors = device.multiprocessors;
  if (few_rows::takes(up, device)) return few_rows::multiply(up, multiprocessors, stream);
  switch (choose_path(up, device).path) {
    case Path::hopper: return hopper::multiply(up, hopper::choose_tile(up, multiprocessors), multiprocessors, stream);
    case Path::portable: return portable::multiply(up, multiprocessors, stream);
    case Path::plain: break;
  }
  SimpleProduct product;
  product.a = {up.x.data, up.x.dtype, 0, s.D, 1, up.map.by_slot};
  const int64_t step = s.layout.in_transposed ? s.D : 1;  // from one of the P F columns to the next
  product.b = {up.w_in.data, up.w_in.dtype, s.D * s.P * s.F, s.layout.in_transposed ? 1 : s.P * s.F,
               s.hidden_column(0, 1) * step};
  product.b.part_step = s.hidden_column(1, 0) * step;
  product.map = up.map;
  product.group_sizes = up.group_sizes;
  product.R = s.R;
  product.E = s.E;
  product.rows = s.R;
  product.columns = s.F;
  product.k = s.D;
  return s.P == 2 ? simple::launch_rows_product(product, Activate<2>{up}, multiprocessors, stream)
                  : simple::launch_rows_product(product, Activate<1>{up}, multiprocessors, stream);
}

}  // namespace anabranch::cuda
