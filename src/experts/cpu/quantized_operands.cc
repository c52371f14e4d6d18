#include "experts/cpu/quantized_operands.h"

#include "experts/cpu/packed.h"

namespace anabranch {
namespace {

int64_t num_elements(const ab_tensor& tensor) {
  int64_t count = 1;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) count *= tensor.shape[axis];
  return count;
}

}  // namespace

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

WeightOperand::WeightOperand(Workspace& workspace, const ab_tensor* w, const ab_tensor* block_scales, int32_t dtype,
                             bool transposed)
    : matrices_(matrices_of(w, transposed)) {
  if (block_scales == nullptr) return;
  const void* scales = data<const void>(block_scales);
  if (w->dtype == AB_FLOAT8_E4M3 && block_scales->dtype != AB_FLOAT32) {
    scales_to_load_ = block_scales;
    scales = workspace.take<float>(num_elements(*block_scales));
  }
  matrices_.packed = {scales, 0, 0, dtype};
}

void WeightOperand::fill(int threads) const {
  if (scales_to_load_ != nullptr) {
    AB_SELECT_ISA(kPacked).load_scales(scales_to_load_->dtype, scales_to_load_->data, num_elements(*scales_to_load_),
                                       static_cast<float*>(const_cast<void*>(matrices_.packed.scales)));
  }
  if (is_pending_) quantize_weights(threads, pending_);
}

}  // namespace anabranch
