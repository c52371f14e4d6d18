// Checks of the expert operations: shapes, dtypes and ranges in one place.
#pragma once

#include "anabranch/experts.h"
#include "core/tensor.h"

namespace anabranch {

// Sizes of a grouped product; w is [E, D, N] whichever way it is stored.
struct GroupedSizes {
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t N = 0;
};

// The same of one whose rows are summed by token.
struct CombinedSizes : GroupedSizes {
  int64_t T = 0;
  int64_t K = 0;
};

// How the weights of a feed-forward network lie in memory, by the layouts of experts.h.
struct WeightLayout {
  bool in_transposed = false;   // W_in's columns stand in rows of D: (P, F, D) or (F, P, D)
  bool interleaved = false;     // columns of gate and up alternate, in W_in, b_in and h
  bool out_transposed = false;  // W_out is (D, F)
};

// Sizes of a feed-forward network; T and K are 0 when x holds rows.
struct FfnSizes {
  int64_t T = 0;
  int64_t K = 0;
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t P = 0;
  int64_t F = 0;
  WeightLayout layout;

  int64_t slots() const { return T * K; }
};

ab_status check(const ab_grouped_matmul_args* args, GroupedSizes* sizes);
ab_status check(const ab_grouped_matmul_dw_args* args, GroupedSizes* sizes);
ab_status check(const ab_grouped_matmul_combine_args* args, CombinedSizes* sizes);
ab_status check(const ab_expert_ffn_forward_args* args, FfnSizes* sizes);
ab_status check(const ab_expert_ffn_backward_args* args, FfnSizes* sizes);

}  // namespace anabranch
