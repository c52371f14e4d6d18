#include "experts/cuda/ops/workspace_sizes.h"
#include "experts/cuda/path.h"
#include "experts/cuda/phases.h"
#include "experts/cuda/simple_product.h"

namespace anabranch::cuda {
namespace {

SimpleProduct simple_product(const WeightGradient& g) {
  SimpleProduct product;
  product.a = {g.x.data, g.x.dtype, 0, g.D, 1, g.gathers_x && g.map.by_slot};
  product.b = {g.d_y.data, g.d_y.dtype, 0, g.N, 1, g.gathers_d_y && g.map.by_slot};
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
  // The tensor cores', of either path, which take factors of one dtype.
  if (g.x.dtype != g.d_y.dtype || g.E == 0 || g.D == 0 || g.N == 0) return 0;
  return weight_gradient_bytes(g.R, g.E, g.D, g.N);
}

ab_status compute_weight_gradient(const WeightGradient& g, void* workspace, const Device& device, cudaStream_t stream) {
  if (g.E * g.D * g.N == 0) return ok();
  const int multiprocessors = device.multiprocessors;
  switch (choose_path(g, device).path) {
    case Path::hopper:
      return hopper::multiply(g, hopper::choose_tile(g, multiprocessors), workspace, multiprocessors, stream);
    case Path::portable: return portable::multiply(g, workspace, multiprocessors, stream);
    case Path::plain: break;
  }
  return simple_weight_gradient(simple_product(g), {g.d_w.data, g.d_w.dtype, g.D * g.N, g.N, 1}, g.accumulates,
                                multiprocessors, stream);
}

}  // namespace anabranch::cuda
