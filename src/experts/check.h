// Argument checks of the expert operations: shapes, dtypes and ranges.
#pragma once

#include "anabranch/experts.h"
#include "core/inline.h"
#include "core/tensor.h"

namespace anabranch {

// Sizes of a grouped GEMM. w is [E, D, N] in either storage order.
struct GroupedSizes {
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t N = 0;
  int64_t rank = 0;  // of the adapter; 0: none
};

// Sizes of a grouped GEMM whose rows are summed per token.
struct CombinedSizes : GroupedSizes {
  int64_t T = 0;
  int64_t K = 0;
  int32_t rows_dtype = 0;
};

// Sizes of quantised rows, or of quantised weights [E, D, P, F]; weights [E, D, N] have P = 1 and F = N.
struct QuantizedSizes {
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t P = 0;
  int64_t F = 0;
  int64_t d_stride = 0;  // in w, in elements, like the strides below
  int64_t p_stride = 0;
  int64_t f_stride = 0;
};

// Memory layout of the weights of a feed-forward network; see experts.h.
struct WeightLayout {
  bool in_transposed = false;   // D is contiguous in W_in: (P, F, D) or (F, P, D)
  bool interleaved = false;     // gate and up columns alternate in W_in, b_in and h
  bool out_transposed = false;  // W_out is (D, F)
};

// Sizes of a feed-forward network. T and K are 0 when x holds rows in expert order.
struct FfnSizes {
  int64_t T = 0;
  int64_t K = 0;
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t P = 0;
  int64_t F = 0;
  int64_t rank_in = 0;  // of the adapters of W_in and W_out; 0: none
  int64_t rank_out = 0;
  int32_t dtype = AB_FLOAT32;  // of x, also when only quantised x is given
  WeightLayout layout;

  int64_t slots() const { return T * K; }

  // The index of a column of a part among the P F columns of an intermediate row.
  AB_INLINE int64_t intermediate_column(int64_t part, int64_t column) const {
    return layout.interleaved ? column * P + part : part * F + column;
  }
};

// d_inside: D is the contiguous axis. p_inside: P varies faster than F.
QuantizedSizes weights_of(int64_t E, int64_t D, int64_t P, int64_t F, bool d_inside, bool p_inside);

inline QuantizedSizes sizes_of_w_in(const FfnSizes& s) {
  return weights_of(s.E, s.D, s.P, s.F, s.layout.in_transposed, s.layout.interleaved);
}
inline QuantizedSizes sizes_of_w_out(const FfnSizes& s) {
  return weights_of(s.E, s.F, 1, s.D, s.layout.out_transposed, false);
}

ab_status check(const ab_quantize_rows_args* args, QuantizedSizes* sizes);
ab_status check(const ab_quantize_weights_args* args, QuantizedSizes* sizes);
ab_status check(const ab_grouped_matmul_args* args, GroupedSizes* sizes);
ab_status check(const ab_grouped_matmul_dw_args* args, GroupedSizes* sizes);
ab_status check(const ab_grouped_matmul_combine_args* args, CombinedSizes* sizes);
ab_status check(const ab_expert_ffn_forward_args* args, FfnSizes* sizes);
ab_status check(const ab_expert_ffn_backward_args* args, FfnSizes* sizes);

}  // namespace anabranch
