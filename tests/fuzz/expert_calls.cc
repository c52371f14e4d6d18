#include "expert_calls.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace anabranch::fuzz {

void set_order(const Shape& order, Operand* operand) {
  operand->strides.assign(AB_MAX_RANK, 0);
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    operand->strides[static_cast<size_t>(order[i])] = stride;
    stride *= std::max<int64_t>(operand->view.shape[order[i]], 1);
  }
  operand->view.strides = operand->strides.data();
}

void add_factor(const char* name, const ab_tensor** field, Random& random, int32_t dtype, const Shape& shape,
                Call* call) {
  Operand& factor = call->input(name, field, random.chance(0.5) ? dtype : int32_t{AB_FLOAT32}, shape);
  if (random.chance(0.5)) return;
  Shape order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.bits() % i]);
  set_order(order, &factor);
  if (random.chance(0.2)) factor.strides[0] = 0;
}

}  // namespace anabranch::fuzz
