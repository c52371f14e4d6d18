// The factors of products whose operands may be quantised: given so, or quantised here into the workspace.
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
bool wants_powers_of_two(const Args& args) {
  return args.fp8_scales == AB_FP8_SCALES_POWER_OF_TWO;
}

// Rows of e4m3 with their scales in the workspace; data nullptr where they are not wanted.
Matrix take_quantized_rows(Workspace& workspace, bool wanted, int64_t rows, int64_t columns);

// The second factor of a product: matrices as they are, or quantised.
class WeightFactor {
 public:
  explicit WeightFactor(const ExpertMatrices& as_they_are = {}) : matrices_(as_they_are) {}

  // Of weights [E, D, P, F] of these sizes: [D, P F], or transposed [P F, D], is what a row is multiplied by. q has the
  // axis next to next that is summed over: [E, P, F, D], or transposed [E, D, P, F]. scales [E, D/128, P, F/128]. Where
  // q is NULL, it is made of w.
  WeightFactor(Workspace& workspace, const ab_tensor* w, const ab_tensor* q, const ab_tensor* scales,
               const QuantizedSizes& sizes, bool transposed, bool power_of_two);

  // After this they are there.
  void fill(int threads) const;

  const ExpertMatrices& matrices() const { return matrices_; }

 private:
  ExpertMatrices matrices_;
  WeightsToQuantize pending_ = {};
  bool is_pending_ = false;
};

// Both factors of a grouped product.
template <class Args>
class ProductFactors {
 public:
  ProductFactors(Workspace& workspace, const Args& args, const GroupedSizes& s) : args_(args), s_(s) {
    if (!is_fp8(args)) {
      x_ = matrix_of(args.x, 0, s.D);
      w_ = WeightFactor(matrices_of(args.w, args.transpose_w != 0));
      return;
    }
    const bool transposed = args.transpose_w != 0;
    x_ = args.x_scales != nullptr ? quantized_matrix(args.x, args.x_scales, s.D)
                                  : take_quantized_rows(workspace, true, s.R, s.D);
    w_ = WeightFactor(workspace, args.w, args.w_q, args.w_scales,
                      weights_of(s.E, transposed ? s.N : s.D, 1, transposed ? s.D : s.N, false, false), transposed,
                      wants_powers_of_two(args));
  }

  void fill(int threads) const {
    if (is_fp8(args_) && args_.x_scales == nullptr) {
      quantize_rows(threads, matrix_of(args_.x, 0, s_.D), 1, s_.R, s_.D, {x_, wants_powers_of_two(args_)});
    }
    w_.fill(threads);
  }

  const Matrix& x() const { return x_; }
  const ExpertMatrices& w() const { return w_.matrices(); }

 private:
  const Args& args_;
  const GroupedSizes& s_;
  Matrix x_ = {};
  WeightFactor w_;
};

}  // namespace anabranch
