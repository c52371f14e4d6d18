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

void pack_weight(const char* scales_name, const ab_tensor** scales, Random& random, bool mxfp4, const Shape& order,
                 const ab_tensor* weight, Call* call) {
  Operand& operand = *std::find_if(call->operands.begin(), call->operands.end(),
                                   [&](const Operand& other) { return &other.view == weight; });
  const auto C = static_cast<size_t>(order.back());
  const auto N = static_cast<size_t>(order[order.size() - 2]);
  Shape blocks(weight->shape, weight->shape + weight->rank);
  const bool fp8_blocks = !mxfp4 && blocks[N] % 128 == 0 && blocks[C] % 128 == 0 && random.chance(0.5);
  if (!fp8_blocks && blocks[C] % 32 != 0) return;
  operand.view.dtype = fp8_blocks ? AB_FLOAT8_E4M3 : AB_FLOAT4_E2M1X2;
  set_order(order, &operand);
  blocks[C] /= fp8_blocks ? 128 : 32;
  if (fp8_blocks) blocks[N] /= 128;
  const auto dtype = fp8_blocks ? random.one_of<int32_t>({AB_FLOAT32, AB_BFLOAT16, AB_FLOAT8_E8M0}) : AB_FLOAT8_E8M0;
  set_order(order, &call->input(scales_name, scales, dtype, blocks));
}

}  // namespace anabranch::fuzz
