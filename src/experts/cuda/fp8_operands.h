// Operands of FP8 (e4m3) grouped GEMMs: given quantised, or quantised into the workspace.
#pragma once

#include "core/workspace.h"
#include "experts/check.h"
#include "experts/cuda/quantize.h"

namespace anabranch::cuda {

template <class Args>
bool uses_power_of_two_scales(const Args& args) {
  return args.fp8_scales == AB_FP8_SCALES_POWER_OF_TWO;
}

inline Fp8Output take_fp8_rows(Workspace& workspace, bool needed, int64_t rows, int64_t columns, bool power_of_two) {
  const int64_t count = needed ? rows : 0;
  void* values = workspace.take_rows(count, columns, AB_FLOAT8_E4M3);
  void* scales = workspace.take_rows(count, columns / kScaleBlock, AB_FLOAT32);
  return {values, static_cast<float*>(scales), power_of_two};
}

inline Fp8Output given_fp8_rows(const ab_tensor* q, const ab_tensor* scales, bool power_of_two) {
  return {q->data, static_cast<float*>(scales->data), power_of_two};
}

inline Fp8Rows rows_of(const Fp8Output& out) { return {out.values, out.scales}; }

// Operand B: weights [E, D, P, F]. The contraction runs over D, or over P and F if transposed.
class Fp8WeightOperand {
 public:
  Fp8WeightOperand() = default;
  Fp8WeightOperand(Workspace& workspace, const ab_tensor* w, const ab_tensor* q, const ab_tensor* scales,
                   const QuantizedSizes& sizes, bool transposed, bool power_of_two)
      : w_(w), sizes_(sizes), transposed_(transposed), power_of_two_(power_of_two), pending_(q == nullptr) {
    const int64_t D = sizes.D / kScaleBlock;
    const int64_t F = sizes.F / kScaleBlock;
    weights_.expert_stride = D * sizes.P * F;
    weights_.count = sizes.E * weights_.expert_stride;
    // Scales are [E, D/128, P, F/128]. If transposed, the contracted blocks of P and F are contiguous.
    weights_.k_stride = transposed ? 1 : sizes.P * F;
    weights_.column_stride = transposed ? sizes.P * F : 1;
    weights_.part_stride = F;
    if (pending_) {
      weights_.values = workspace.take_rows(sizes.E * sizes.D, sizes.P * sizes.F, AB_FLOAT8_E4M3);
      weights_.scales = workspace.take<float>(weights_.count);
    } else {
      weights_.values = q->data;
      weights_.scales = static_cast<const float*>(scales->data);
    }
  }

  ab_status fill(cudaStream_t stream) const {
    if (!pending_) return ok();
    void* q = const_cast<void*>(weights_.values);
    return quantize_weights(Floats(w_), sizes_, transposed_ ? q : nullptr, transposed_ ? nullptr : q,
                            const_cast<float*>(weights_.scales), power_of_two_, stream);
  }

  const Fp8Weights& weights() const { return weights_; }

  // The columns from `first` on, a multiple of 128. Each column has k elements.
  Fp8Weights weights_from(int64_t first, int64_t k) const {
    Fp8Weights window = weights_;
    const int64_t scales = first / kScaleBlock * window.column_stride;
    window.values = static_cast<const char*>(window.values) + first * k;
    window.scales += scales;
    window.count -= scales;
    return window;
  }

 private:
  const ab_tensor* w_ = nullptr;
  QuantizedSizes sizes_;
  bool transposed_ = false;
  bool power_of_two_ = false;
  bool pending_ = false;
  Fp8Weights weights_;
};

}  // namespace anabranch::cuda
