// Checks of the expert operations: shapes, dtypes and ranges in one place.
#pragma once

#include "anabranch/experts.h"
#include "core/inline.h"
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
  int32_t rows_dtype = 0;
};

// Rows or weights that are quantised; weights [E, D, N] or [E, D, P, F], the former with P = 1 and F for N.
struct QuantizedSizes {
  int64_t R = 0;
  int64_t E = 0;
  int64_t D = 0;
  int64_t P = 0;
  int64_t F = 0;
  int64_t d_stride = 0;  // in w, from one element of an axis to the next
  int64_t p_stride = 0;
  int64_t f_stride = 0;
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
  int32_t dtype = AB_FLOAT32;  // of x, which need not be there where it is quantised
  WeightLayout layout;

  int64_t slots() const { return T * K; }

  // Where a column of a part stands among the P F of a hidden row.
  AB_INLINE int64_t hidden_column(int64_t part, int64_t column) const {
    return layout.interleaved ? column * P + part : part * F + column;
  }
};

// Of weights of these axes: whether D stands inside F in memory, and P inside both or, with D inside, F.
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
