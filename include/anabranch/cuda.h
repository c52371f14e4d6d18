/* The operations on an NVIDIA GPU: libanabranch_cuda.so.
 *
 * Every function takes the args struct of its CPU namesake, with data pointers to memory that the current device can
 * reach, and runs on exec->stream (a cudaStream_t; NULL: the default stream). A call checks its arguments, enqueues
 * kernels and returns: it never waits for the device, allocates nothing, and its launches depend on shapes alone, so it
 * can be captured in a CUDA graph. Results are the same bits on every run. What a kernel reads from device memory
 * (indices, sizes, masks) never leads it outside a buffer.
 *
 * Needs compute capability 8.0 or newer. */
#ifndef ANABRANCH_CUDA_H_
#define ANABRANCH_CUDA_H_

#include "anabranch/balance.h"
#include "anabranch/dispatch.h"
#include "anabranch/experts.h"
#include "anabranch/router.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most experts of a call of the router; more are AB_UNSUPPORTED. */
#define AB_CUDA_MAX_EXPERTS 8192

/* "key=value" lines: version, cuda (the runtime's version), driver, for each device what it is and which kernels the
 * experts try first there; or error=why there is none. */
AB_API void ab_cuda_describe(char* text, size_t size);

/* Tensors, options and errors are those of router.h. At most AB_CUDA_MAX_EXPERTS experts. Fast up to 1024 experts and
 * 64 experts a token; beyond that either pass is a slower kernel, a warp a token, which the forward pass refuses with
 * AB_UNSUPPORTED where a token's experts and outputs do not fit the shared memory of a multiprocessor. */
AB_API ab_status ab_cuda_router_forward(const ab_router_forward_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_router_forward_workspace(const ab_router_forward_args* args, const ab_exec* exec,
                                                  size_t* bytes);
/* Workspace: [T, K] int32 where the selection is given as anything else, else none. */
AB_API ab_status ab_cuda_router_backward(const ab_router_backward_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_router_backward_workspace(const ab_router_backward_args* args, const ab_exec* exec,
                                                   size_t* bytes);

AB_API ab_status ab_cuda_load_balance_loss(const ab_load_balance_loss_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_moe_aux_loss(const ab_moe_aux_loss_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_moe_aux_loss_workspace(const ab_moe_aux_loss_args* args, const ab_exec* exec, size_t* bytes);
AB_API ab_status ab_cuda_score_sum(const ab_score_sum_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_score_sum_workspace(const ab_score_sum_args* args, const ab_exec* exec, size_t* bytes);

AB_API ab_status ab_cuda_plan(const ab_plan_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_plan_workspace(const ab_plan_args* args, const ab_exec* exec, size_t* bytes);

/* Tensors, dtypes and errors are those of dispatch.h; none of these four needs a workspace. Results are the CPU's to
 * the bit (NaN payloads aside), but for d_weights, added up in float32 in another order, the same on every run. Fastest
 * where rows begin at multiples of 16 bytes; any other address and width will do. */
AB_API ab_status ab_cuda_dispatch(const ab_dispatch_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_combine(const ab_combine_args* args, const ab_exec* exec);
/* Reads d_out and rows once for both gradients where d_out, rows and d_rows have one dtype; else in two passes. */
AB_API ab_status ab_cuda_combine_backward(const ab_combine_backward_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_expand_row_id_map(const ab_expand_row_id_map_args* args, const ab_exec* exec);

/* S < 2^31, else AB_UNSUPPORTED. */
AB_API ab_status ab_cuda_sort_chunks(const ab_sort_chunks_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_sort_chunks_workspace(const ab_sort_chunks_args* args, const ab_exec* exec, size_t* bytes);

/* On every GPU. */
AB_API ab_status ab_cuda_quantize_rows(const ab_quantize_rows_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_quantize_rows_workspace(const ab_quantize_rows_args* args, const ab_exec* exec, size_t* bytes);
AB_API ab_status ab_cuda_quantize_weights(const ab_quantize_weights_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_quantize_weights_workspace(const ab_quantize_weights_args* args, const ab_exec* exec,
                                                    size_t* bytes);

/* With AB_PRECISION_FP8 products run on hopper's kernels alone, see below: on compute capability 9.0, of operands from
 * addresses that are multiples of 16 on, where results and what is kept have 16 bits: else AB_UNSUPPORTED. Sums of 128
 * products keep what these tensor cores keep of float32, 14 binary digits at least; those of blocks are float32.
 * ab_cuda_expert_ffn_forward gives `a` quantised or not at all. Workspace: for every factor that is quantised inside,
 * its elements and 4 bytes for each block; `a` is not there in 16 bits. `a` and dh are divided
 * by their scales by way of a reciprocal: where a quotient lies between two numbers of e4m3 to 24 binary digits it may
 * become either.
 *
 * Products run on the first kernels that can take them:
 *   hopper    on compute capability 9.0, of bfloat16 and float16 where rows of x, w and y are whole 16-byte chunks from
 *             aligned addresses on;
 *   portable  on the tensor cores of every device, of float32, bfloat16 and float16, any width and address; fastest
 *             where rows are such chunks. Float32 is multiplied as float32, by three products of TF32, or with
 *             AB_PRECISION_TF32 by one.
 * Both count rows, columns and tiles in int32: 2^30 or more of any of these are AB_UNSUPPORTED, and the message names
 * the size. ANABRANCH_CUDA_PATH=portable in the environment, read once, excludes hopper. */
AB_API ab_status ab_cuda_grouped_matmul(const ab_grouped_matmul_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_grouped_matmul_workspace(const ab_grouped_matmul_args* args, const ab_exec* exec,
                                                  size_t* bytes);

/* On the same kernels. Sums over more rows than a bound that depends on shapes alone are cut, and their parts are added
 * in order. Workspace: at most 144 MiB and 16 bytes per expert. x and d_y of two dtypes are converted to float32 in the
 * workspace, each that is not float32; so is d_w, where its dtype is neither float32 nor that of the product. */
AB_API ab_status ab_cuda_grouped_matmul_dw(const ab_grouped_matmul_dw_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_grouped_matmul_dw_workspace(const ab_grouped_matmul_dw_args* args, const ab_exec* exec,
                                                     size_t* bytes);

/* In chunks of columns: the product of the rows with some columns of w, then the sums of these, and on. Same bits as
 * ab_cuda_grouped_matmul or the products of the feed-forward network, whichever has such operands, and ab_cuda_combine.
 * Workspace: [R, C] of the dtype of x, with AB_PRECISION_FP8 of that of out. W is as many elements as w has, without
 * backward and where R <= E N twice as many (those of the gated W_in), or if that is more, 2^22. Where R N <= W or
 * N < 2048, C = N; else C = min(N, t ceil(n / chunks)) for n = ceil(N / t) tiles, in as many chunks as R C <= W takes,
 * but no more than floor(n / 4); t = 256 with AB_PRECISION_FP8, or with backward and D >= 1536, else 192. */
AB_API ab_status ab_cuda_grouped_matmul_combine(const ab_grouped_matmul_combine_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_grouped_matmul_combine_workspace(const ab_grouped_matmul_combine_args* args,
                                                          const ab_exec* exec, size_t* bytes);

/* On the same kernels, gathers, biases, activations, weights and padding included: Hopper's where D and F are multiples
 * of 8 and all matrices and biases begin at multiples of 16 bytes. A d_out of another dtype than x is first rounded to
 * the dtype of x, in the workspace; with AB_PRECISION_FP8, Q(d_out) is that of d_out as it came. Results are the CPU's
 * up to the order of float32 additions and the exponential's last places; a float32 operand of the portable kernels
 * that is infinite, or within 2^-12 of that, gives NaN. Where two rows have one slot, which no plan gives, d_weights of
 * that slot is one of both. Workspace: forward, without a, [R, F] of the dtype of x. Backward
 * w a, [R, F] of the dtype of x, when d_w_out is wanted and weighted_a is not given; dh, [R, P, F], when something
 * needs it and it is not given; d_out in the dtype of x, when it has another; and the largest of what single steps
 * take:
 *   - d_weights: ceil(F / 128) R floats;
 *   - d_b_in, d_b_out: (ceil(R / 512) + E) P F and (ceil(R / 512) + E) D floats;
 *   - d_w_in, d_w_out: what ab_cuda_grouped_matmul_dw takes for the same product. */
AB_API ab_status ab_cuda_expert_ffn_forward(const ab_expert_ffn_forward_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_expert_ffn_forward_workspace(const ab_expert_ffn_forward_args* args, const ab_exec* exec,
                                                      size_t* bytes);
AB_API ab_status ab_cuda_expert_ffn_backward(const ab_expert_ffn_backward_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_expert_ffn_backward_workspace(const ab_expert_ffn_backward_args* args, const ab_exec* exec,
                                                       size_t* bytes);

/* Answers which kernels the experts of a layer run on, on the current device. *path: those of "few_rows" (GEMMs of few
 * rows, see below), "hopper" and "portable" that run, in this order, with + between them. *why_not: why hopper's do not
 * run where portable ones do, else NULL; why_not itself may be NULL. Both texts are static.
 *
 * The layer has T K rows without alignment, and operands of one dtype (float16, bfloat16 or float32, an ab_dtype) that
 * begin at multiples of 16 bytes; an operation itself looks at its own operands. P: 2 with a gate, else 1. The flags
 * are 0 or 1. w_in_transposed: W_in lies in memory with D innermost, w_out_transposed: W_out with F innermost;
 * backward: of the forward and the backward pass, else of the forward pass alone.
 *
 * GEMMs with at most 4 rows per expert on average have kernels of their own on every device, where elements have 16
 * bits, rows are whole 16-byte chunks and weights lie with the contraction innermost. */
AB_API ab_status ab_cuda_experts_path(int32_t dtype, int64_t T, int64_t K, int64_t E, int64_t D, int64_t P, int64_t F,
                                      int32_t w_in_transposed, int32_t w_out_transposed, int32_t backward,
                                      const char** path, const char** why_not);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_CUDA_H_ */
