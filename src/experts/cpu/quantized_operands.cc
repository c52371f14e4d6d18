#include "experts/cpu/quantized_operands.h"

namespace anabranch {

Matrix take_quantized_rows(Workspace& workspace, bool needed, int64_t rows, int64_t columns) {
  const int64_t blocks = columns / kScaleBlock;
  void* q = workspace.take_rows(needed ? rows : 0, columns, AB_FLOAT8_E4M3);
  void* scales = workspace.take_rows(needed ? rows : 0, blocks, AB_FLOAT32);
  return {q, AB_FLOAT8_E4M3, columns, nullptr, {static_cast<float*>(scales), blocks, 1, 1}};
}

WeightOperand::WeightOperand(Workspace& workspace, const ab_tensor* w, const ab_tensor* q, const ab_tensor* scales,
                             const QuantizedSizes& s, bool transposed, bool power_of_two)
    : is_pending_(q == nullptr) {
  const int64_t columns = s.P * s.F;
  const int64_t blocks = columns / kScaleBlock;
  void* q_memory = q != nullptr ? data<void>(q) : workspace.take_rows(s.E * s.D, columns, AB_FLOAT8_E4M3);
  auto* scales_memory = static_cast<float*>(
      q != nullptr ? data<void>(scales) : workspace.take_rows(s.E * (s.D / kScaleBlock), blocks, AB_FLOAT32));
  matrices_ = {
      q_memory, AB_FLOAT8_E4M3, true, {scales_memory, transposed ? blocks : 1, transposed ? 1 : blocks, kScaleBlock}};
  auto* bytes = static_cast<uint8_t*>(q_memory);
  if (is_pending_) {
    pending_ = {data<const void>(w),          w->dtype,     s, power_of_two, transposed ? bytes : nullptr,
                transposed ? nullptr : bytes, scales_memory};
  }
}

void WeightOperand::fill(int threads) const {
  if (is_pending_) quantize_weights(threads, pending_);
}

}  // namespace anabranch
