/* Upper bounds of the workspaces of libanabranch_cuda.so, from sizes alone. The functions are in libanabranch.so: a
 * front end calls them while it traces, when neither the CUDA library nor a GPU need be present.
 *
 * Each bound is at least what ab_cuda_OPERATION_workspace of cuda.h returns for tensors of these sizes, on every
 * device and with every option. The letters name the axes of the tensors in router.h, dispatch.h and experts.h. A
 * call returns AB_INVALID_ARGUMENT if a size is negative, if a dtype (ab_dtype) is not a float, or if an array of
 * these axes takes more than 2^56 bytes. */
#ifndef ANABRANCH_CUDA_WORKSPACES_H_
#define ANABRANCH_CUDA_WORKSPACES_H_

#include "anabranch/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bound for ab_cuda_router_forward without qb_histogram, and for ab_cuda_score_sum. B = 1 if the statistics are [E]. */
AB_API ab_status ab_cuda_statistics_workspace_bound(int64_t T, int64_t B, int64_t E, size_t* bytes);

/* Additional bytes of ab_cuda_router_forward with qb_histogram. */
AB_API ab_status ab_cuda_quantile_workspace_bound(int64_t T, size_t* bytes);

/* slots: T K, or T E for a routing map. */
AB_API ab_status ab_cuda_plan_workspace_bound(int64_t slots, int64_t E, size_t* bytes);

AB_API ab_status ab_cuda_sort_chunks_workspace_bound(int64_t S, size_t* bytes);

/* If x_dtype = d_y_dtype, the bound holds for a d_w of that dtype or float32. It includes a d_w of one matrix that all
 * experts share. */
AB_API ab_status ab_cuda_grouped_matmul_dw_workspace_bound(int64_t R, int64_t E, int64_t D, int64_t N, int32_t x_dtype,
                                                           int32_t d_y_dtype, size_t* bytes);

/* Exact. dtype is the dtype of x; AB_FLOAT8_E4M3 means that x and w are given quantised. */
AB_API ab_status ab_cuda_grouped_matmul_combine_workspace_bound(int64_t R, int64_t E, int64_t D, int64_t N,
                                                                int32_t backward, int32_t dtype, size_t* bytes);

/* Replaces the bound above for a call with `returning`. P: ranks; T: tokens per rank, so `out` is [P T, N]; dtype: that
 * of x and of `out`. */
AB_API ab_status ab_cuda_returning_workspace_bound(int64_t R, int64_t P, int64_t T, int64_t N, int32_t dtype,
                                                   size_t* bytes);

/* Additional bytes of ab_cuda_expert_ffn_forward and ab_cuda_expert_ffn_backward with `arriving`. */
AB_API ab_status ab_cuda_arriving_workspace_bound(int64_t E, size_t* bytes);

/* Additional bytes of an operation with AB_PRECISION_FP8 for each tensor that it quantises: x [R, D] of a grouped
 * GEMM; in ab_cuda_expert_ffn_forward x [T, D] and, for a call without `a`, `a` [R, F], which replaces the bound
 * below; in ab_cuda_expert_ffn_backward d_out [T, D], for a call with h, and dh [R, P F], if dx_rows is requested
 * and dh_q is not given. Assumes that the weights are given quantised. */
AB_API ab_status ab_cuda_fp8_rows_workspace_bound(int64_t R, int64_t D, size_t* bytes);

/* Additional bytes of an operation for each low-rank adapter, of rank r, of a matrix [M, N]: the factors in the dtype
 * of x, the rows [R, r] that the caller does not take, and for ab_cuda_expert_ffn_backward (backward = 1) the gradients
 * of the factors and up to 64 MiB of partial sums of v_in or z. W_in has M = D and N = P F, W_out M = F and N = D. A
 * call that reads u instead of A has M = 0. With AB_PRECISION_FP8 an adapter of W_out also needs
 * ab_cuda_expert_ffn_forward_workspace_bound(), for a forward pass with or without `a`. */
AB_API ab_status ab_cuda_lora_workspace_bound(int64_t R, int64_t E, int64_t M, int64_t N, int64_t r, int32_t backward,
                                              int32_t dtype, size_t* bytes);

/* Additional bytes of an operation with packed weights [E, N, C] in a GEMM of R rows of a dtype. A call with two such
 * weights needs the larger of both. backward: 1 in ab_cuda_expert_ffn_backward and in
 * ab_cuda_grouped_matmul_combine without transpose_w, whose GEMMs do not sum over C; else 0, and few rows need no
 * bytes. */
AB_API ab_status ab_cuda_unpacked_workspace_bound(int64_t R, int64_t E, int64_t N, int64_t C, int32_t backward,
                                                  int32_t dtype, size_t* bytes);

/* For a call without `a`; a call that requests `a` needs no workspace. dtype is the dtype of x. */
AB_API ab_status ab_cuda_expert_ffn_forward_workspace_bound(int64_t R, int64_t F, int32_t dtype, size_t* bytes);

/* The reasons for which a call of ab_cuda_expert_ffn_backward may need a workspace; combine them with |. */
typedef enum ab_cuda_ffn_backward_need {
  AB_CUDA_NEED_WEIGHTED_A = 1, /* d_w_out is requested and weighted_a is not given */
  AB_CUDA_NEED_D_WEIGHTS = 2,  /* d_weights is requested */
  AB_CUDA_NEED_D_W_OUT = 4,    /* d_w_out or d_b_out is requested */
  AB_CUDA_NEED_D_W_IN = 8      /* d_w_in or d_b_in is requested */
} ab_cuda_ffn_backward_need;

/* For a call that is given dh if any output needs it. dtype is the dtype of x, d_dtype that of d_out. If they
 * differ, the bound assumes a d_out of R rows; T rows take (T - R) D more elements of `dtype`. */
AB_API ab_status ab_cuda_expert_ffn_backward_workspace_bound(int64_t R, int64_t E, int64_t D, int64_t P, int64_t F,
                                                             int32_t dtype, int32_t d_dtype, int32_t needs,
                                                             size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_CUDA_WORKSPACES_H_ */
