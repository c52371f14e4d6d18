/* How large the workspaces of libanabranch_cuda.so may get, by sizes alone. In libanabranch.so: a compiler's front end
 * asks while it traces, also where there is neither that library nor a GPU.
 *
 * Each bound is at least what ab_cuda_OPERATION_workspace of cuda.h says, on every device and with every option, for
 * tensors of these sizes; the letters are those of the tensors' axes in router.h, dispatch.h and experts.h. Sizes must
 * not be negative, dtypes be those of floats (ab_dtype), and arrays of these axes take at most 2^56 bytes; else
 * AB_INVALID_ARGUMENT. */
#ifndef ANABRANCH_CUDA_WORKSPACES_H_
#define ANABRANCH_CUDA_WORKSPACES_H_

#include "anabranch/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of ab_cuda_router_forward without a qb_histogram, and ab_cuda_score_sum; B = 1 where the statistics are [E]. */
AB_API ab_status ab_cuda_statistics_workspace_bound(int64_t T, int64_t B, int64_t E, size_t* bytes);

/* What ab_cuda_router_forward takes more with a qb_histogram. */
AB_API ab_status ab_cuda_quantile_workspace_bound(int64_t T, size_t* bytes);

/* slots: T K, or T E of a map. */
AB_API ab_status ab_cuda_plan_workspace_bound(int64_t slots, int64_t E, size_t* bytes);

AB_API ab_status ab_cuda_sort_chunks_workspace_bound(int64_t S, size_t* bytes);

/* Where x_dtype = d_y_dtype, for a d_w of that dtype or float32. */
AB_API ab_status ab_cuda_grouped_matmul_dw_workspace_bound(int64_t R, int64_t E, int64_t D, int64_t N, int32_t x_dtype,
                                                           int32_t d_y_dtype, size_t* bytes);

/* Exact. dtype: of x; AB_FLOAT8_E4M3: it comes quantised, and so does w. */
AB_API ab_status ab_cuda_grouped_matmul_combine_workspace_bound(int64_t R, int64_t E, int64_t D, int64_t N,
                                                                int32_t backward, int32_t dtype, size_t* bytes);

/* What an operation with AB_PRECISION_FP8 takes more for each of these that it quantises: x [R, D] of a grouped
 * product, in ab_cuda_expert_ffn_forward x [T, D] and, for a call without a, `a` [R, F] in the place of what stands
 * below; in ab_cuda_expert_ffn_backward d_out [T, D], for a call with h, and dh [R, P F], where dx_rows is wanted and
 * dh_q is not given. For weights that come quantised. */
AB_API ab_status ab_cuda_fp8_rows_workspace_bound(int64_t R, int64_t D, size_t* bytes);

/* For a call without a; one that wants a needs none. dtype: of x. */
AB_API ab_status ab_cuda_expert_ffn_forward_workspace_bound(int64_t R, int64_t F, int32_t dtype, size_t* bytes);

/* Why a call of ab_cuda_expert_ffn_backward may need a workspace, or'ed. */
typedef enum ab_cuda_ffn_backward_need {
  AB_CUDA_NEED_WEIGHTED_A = 1, /* d_w_out is wanted, and weighted_a is not given */
  AB_CUDA_NEED_D_WEIGHTS = 2,  /* d_weights is wanted */
  AB_CUDA_NEED_D_W_OUT = 4,    /* d_w_out or d_b_out is wanted */
  AB_CUDA_NEED_D_W_IN = 8      /* d_w_in or d_b_in is wanted */
} ab_cuda_ffn_backward_need;

/* For a call that brings dh, where something needs it. dtype: of x; d_dtype: of d_out. Where they differ, the bound is
 * for a d_out of R rows; T rows take (T - R) D elements of `dtype` more. */
AB_API ab_status ab_cuda_expert_ffn_backward_workspace_bound(int64_t R, int64_t E, int64_t D, int64_t P, int64_t F,
                                                             int32_t dtype, int32_t d_dtype, int32_t needs,
                                                             size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_CUDA_WORKSPACES_H_ */
