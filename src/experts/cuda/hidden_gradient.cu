#include "experts/cuda/path.h"
#include "experts/cuda/phases.h"
#include "experts/cuda/simple_product.cuh"

namespace anabranch::cuda {
namespace {

template <bool kGated>
struct Differentiate {
  static constexpr int kParts = 1;
  HiddenGradient op;

  __device__ __forceinline__ void operator()(const Tile& tile, const simple::Results<kParts>& results) const {
#pragma unroll
    for (int i = 0; i < simple::kEach; ++i) {
      const bool is_row = i < results.rows;
      const int32_t row = results.row + i;
      const int32_t slot = is_row && tile.expert != kNoExpert ? op.map.slot_of(row) : -1;
      const float weight = slot < 0 ? 0.0f : op.weights[slot];
      float dot = 0.0f;
#pragma unroll
      for (int j = 0; j < simple::kEach; ++j) {
        if (!is_row || j >= results.columns) continue;
        const int64_t column = results.column + j;
        if (slot < 0) {
          write(row, column, 0.0f, 0.0f, 0.0f);
        } else {
          dot += differentiate(row, column, weight, results.sums[0][i][j]);
        }
      }
      if (op.dots == nullptr) continue;
      dot = sum_lanes<simple::kThreadsOfRow>(dot);  // all lanes are here
      if (is_row && lane_index() % simple::kThreadsOfRow == 0) {
        op.dots[tile.column / simple::kSide * op.s.R + row] = dot;
      }
    }
  }

  // Of one element; returns its share of <da', a>. Out of line, or copies of it were most of the kernel's code.
  __device__ __noinline__ float differentiate(int64_t row, int64_t column, float weight, float d_a) const {
    const int64_t at = row * op.s.P * op.s.F;
    const float gate = op.h[at + op.s.hidden_column(0, column)];
    const float up = kGated ? op.h[at + op.s.hidden_column(1, column)] : 1.0f;
    ActivationAt a{};
    with_formula(op.activation,
                 [&]<Formula kFormula>() { a = activate_with_slopes<kFormula>(op.activation, gate, up); });
    write(row, column, a.by_gate * (weight * d_a), a.by_up * (weight * d_a), weight * a.value);
    return d_a * a.value;
  }

  __device__ void write(int64_t row, int64_t column, float d_gate, float d_up, float weighted_a) const {
    const int64_t at = row * op.s.P * op.s.F;
    if (op.dh.data != nullptr) op.dh.set(at + op.s.hidden_column(0, column), d_gate);
    if (kGated && op.dh.data != nullptr) op.dh.set(at + op.s.hidden_column(1, column), d_up);
    if (op.weighted_a.data != nullptr) op.weighted_a.set(row * op.s.F + column, weighted_a);
  }
};

}  // namespace

int64_t dot_parts(const HiddenGradient& op, const Device& device) {
  switch (choose_path(op, device).path) {
    case Path::hopper: return hopper::parts_of_dots(op, hopper::choose_tile(op, device.multiprocessors));
    case Path::portable: return portable::parts_of_dots(op);
    case Path::plain: break;
  }
  return simple::tiles_of(op.s.F);
}

ab_status compute_hidden_gradient(const HiddenGradient& op, const Device& device, cudaStream_t stream) {
  const FfnSizes& s = op.s;
  const bool wanted = op.dh.data != nullptr || op.weighted_a.data != nullptr || op.dots != nullptr;
  if (!wanted || s.R * s.F == 0) return ok();
  const int multiprocessors = device.multiprocessors;
  switch (choose_path(op, device).path) {
    case Path::hopper: return hopper::multiply(op, hopper::choose_tile(op, multiprocessors), multiprocessors, stream);
    case Path::portable: return portable::multiply(op, multiprocessors, stream);
    case Path::plain: break;
  }
  SimpleProduct product;
  product.a = {op.d_y.data, op.d_y.dtype, 0, s.D, 1, op.map.by_slot};
  const bool transposed = s.layout.out_transposed;
  product.b = {op.w_out.data, op.w_out.dtype, s.F * s.D, transposed ? s.F : 1, transposed ? 1 : s.D};
  product.map = op.map;
  product.group_sizes = op.group_sizes;
  product.R = s.R;
  product.E = s.E;
  product.rows = s.R;
  product.columns = s.F;
  product.k = s.D;
  return s.P == 2 ? simple::launch_rows_product(product, Differentiate<true>{op}, multiprocessors, stream)
                  : simple::launch_rows_product(product, Differentiate<false>{op}, multiprocessors, stream);
}

}  // namespace anabranch::cuda
