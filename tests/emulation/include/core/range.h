// The emulator has no profiler, and is built without the CUDA toolkit.
#pragma once

namespace anabranch {

enum class Phase {
  route,
  plan,
  dispatch,
  combine,
  combine_backward,
  exchange,
  quantize,
  up,
  down,
  hidden_gradient,
  weight_gradients,
  d_x,
  route_backward,
  aux_loss,
  grouped_matmul,
};

class [[maybe_unused]] Range {
 public:
  explicit Range(Phase) {}
  ~Range() {}
};

}  // namespace anabranch
