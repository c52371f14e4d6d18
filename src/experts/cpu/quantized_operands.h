// Operands of grouped GEMMs that may be quantised (given quantised, or quantised into the workspace) or packed.
#pragma once

#include <cstdint>

#include "anabranch/experts.h"
#include "core/workspace.h"
#include "experts/check.h"
#include "experts/cpu/phases.h"
#include "experts/cpu/quantize.h"
#include "experts/precision.h"

namespace anabranch {

template <class Args>
bool uses_power_of_two_scales(const Args& args) {
  return args.fp8_scales == AB_FP8_SCALES_POWER_OF_TWO;
}

// Takes e4m3 rows and their scales from the workspace. data is nullptr if they are not needed.
Matrix take_quantized_rows(Workspace& workspace, bool needed, int64_t rows, int64_t columns);

// Operand B of a grouped GEMM: matrices as stored, packed, or quantised.
class WeightOperand {
 public:
  explicit WeightOperand(const ExpertMatrices& as_they_are = {}) : matrices_(as_they_are) {}

  // Matrices as stored, or packed if there are block_scales. The values of packed ones are rounded to `dtype`.
  WeightOperand(Workspace& workspace, const ab_tensor* w, const ab_tensor* block_scales, int32_t dtype,
                bool transposed);

  // Weights [E, D, P, F]. The GEMM multiplies rows by [D, P F], or transposed by [P F, D]. The contraction is innermost
  // in q: [E, P, F, D], or transposed [E, D, P, F]. scales: [E, D/128, P, F/128]. If q is NULL, w is quantised.
  WeightOperand(Workspace& workspace, const ab_tensor* w, const ab_tensor* q, const ab_tensor* scales,
                const QuantizedSizes& sizes, bool transposed, bool power_of_two);

  // Quantises the weights unless they were given quantised, and converts scales of FP8 blocks to float32.
  void fill(int threads) const;

  const ExpertMatrices& matrices() const { return matrices_; }

 private:
  ExpertMatrices matrices_;
  WeightsToQuantize pending_ = {};
  bool is_pending_ = false;
  const ab_tensor* scales_to_load_ = nullptr;
};

// Scales of packed weights; NULL: they are not packed.
inline const ab_tensor* block_scales_of(const ab_grouped_matmul_args&) { return nullptr; }
inline const ab_tensor* block_scales_of(const ab_grouped_matmul_combine_args& args) { return args.w_block_scales; }

// Operands A and B of a grouped GEMM.
template <class Args>
class ProductOperands {
 public:
  ProductOperands(Workspace& workspace, const Args& args, const GroupedSizes& s) : args_(args), s_(s) {
    if (!is_fp8(args)) {
      x_ = matrix_of(args.x, 0, s.D);
      w_ = WeightOperand(workspace, args.w, block_scales_of(args), args.x->dtype, args.transpose_w != 0);
      return;
    }
    const bool transposed = args.transpose_w != 0;
    x_ = args.x_scales != nullptr ? quantized_matrix(args.x, args.x_scales, s.D)
                                  : take_quantized_rows(workspace, true, s.R, s.D);
    w_ = WeightOperand(workspace, args.w, args.w_q, args.w_scales,
                       weights_of(s.E, transposed ? s.N : s.D, 1, transposed ? s.D : s.N, false, false), transposed,
                       uses_power_of_two_scales(args));
  }

  void fill(int threads) const {
    if (is_fp8(args_) && args_.x_scales == nullptr) {
      quantize_rows(threads, matrix_of(args_.x, 0, s_.D), 1, s_.R, s_.D, {x_, uses_power_of_two_scales(args_)});
    }
    w_.fill(threads);
  }

  const Matrix& x() const { return x_; }
  const ExpertMatrices& w() const { return w_.matrices(); }

 private:
  const Args& args_;
  const GroupedSizes& s_;
  Matrix x_ = {};
  WeightOperand w_;
};

}  // namespace anabranch
