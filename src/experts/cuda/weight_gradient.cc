#include "experts/cuda/weight_gradient.h"

#include "experts/cuda/simple_product.h"
#include "experts/hopper/products.h"

namespace anabranch::cuda {
namespace {

SimpleProduct simple_product(const WeightGradient& g) {
  SimpleProduct product;
  product.a = {g.x.data, g.x.dtype, 0, g.D, 1, g.gathers_x && g.map.slots != nullptr};
  product.b = {g.d_y.data, g.d_y.dtype, 0, g.N, 1, g.gathers_d_y && g.map.slots != nullptr};
  product.map = g.map;
  product.group_sizes = g.group_sizes;
  product.R = g.R;
  product.E = g.E;
  product.rows = g.D;
  product.columns = g.N;
  product.k = g.R;
  return product;
}

}  // namespace

size_t workspace_of(const WeightGradient& g) {
  return hopper::supports(g, hopper::Alignment::ignored) ? hopper::workspace_of(g) : 0;
}

ab_status compute_weight_gradient(const WeightGradient& g, void* workspace, int multiprocessors, cudaStream_t stream) {
  if (g.E * g.D * g.N == 0) return ok();
  if (hopper::supports(g)) {
    return hopper::multiply(g, hopper::choose_tile(g, multiprocessors), workspace, multiprocessors, stream);
  }
  return simple_weight_gradient(simple_product(g), {g.d_w.data, g.d_w.dtype, g.D * g.N, g.N, 1}, g.accumulates,
                                multiprocessors, stream);
}

}  // namespace anabranch::cuda
