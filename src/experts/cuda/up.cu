#include "experts/cuda/up.h"

#include "experts/cuda/path.h"
#include "experts/cuda/simple_product.cuh"

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
        float h[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) h[part] = results.sums[part][i][j];
        write(tile.expert, row, results.column + j, slot, h);
      }
    }
  }

  // One element; out of line, or copies of it were most of the kernel's code.
  __device__ __noinline__ void write(int32_t expert, int64_t row, int64_t column, int32_t slot,
                                     float (&h)[kParts]) const {
    float a = 0.0f;
    for (int part = 0; part < kParts; ++part) h[part] = slot < 0 ? 0.0f : h[part] + bias(expert, part, column);
    if (slot >= 0) {
      with_formula(up.activation, [&]<Formula kFormula>() {
        a = up.weights[slot] * activate<kFormula>(up.activation, h[0], kParts == 2 ? h[kParts - 1] : 1.0f);
      });
    }
    up.a.set(row * up.s.F + column, a);
    if (up.h.data == nullptr) return;
    for (int part = 0; part < kParts; ++part) {
      up.h.set(row * kParts * up.s.F + up.s.hidden_column(part, column), h[part]);
    }
  }

  __device__ float bias(int64_t expert, int part, int64_t column) const {
    return up.b_in.data == nullptr ? 0.0f : up.b_in[expert * kParts * up.s.F + up.s.hidden_column(part, column)];
  }
};

}  // namespace

ab_status compute_up(const Up& up, const Device& device, cudaStream_t stream) {
  const FfnSizes& s = up.s;
  if (s.R * s.F == 0) return ok();
  const int multiprocessors = device.multiprocessors;
  switch (choose_path(up, device).path) {
    case Path::hopper: return hopper::multiply(up, hopper::choose_tile(up, multiprocessors), multiprocessors, stream);
    case Path::portable: return portable::multiply(up, multiprocessors, stream);
    case Path::plain: break;
  }
  SimpleProduct product;
  product.a = {up.x.data, up.x.dtype, 0, s.D, 1, up.map.slots != nullptr};
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
