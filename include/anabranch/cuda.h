/* The operations on an NVIDIA GPU: libanabranch_cuda.so.
 *
 * Every function takes the args struct of the CPU function with the matching name. Data pointers refer to memory
 * that the current device can access. The work runs on exec->stream (a cudaStream_t; NULL: the default stream). A
 * call checks its arguments, enqueues kernels and returns: it never waits for the device and allocates nothing, and
 * its launches depend on shapes alone, so it can be captured in a CUDA graph. Results are bitwise identical on every
 * run. Values that a kernel reads from device memory (indices, sizes, masks) never cause an access outside a buffer.
 *
 * Requires compute capability 8.0 or newer. */
#ifndef ANABRANCH_CUDA_H_
#define ANABRANCH_CUDA_H_

#include "anabranch/balance.h"
#include "anabranch/dispatch.h"
#include "anabranch/experts.h"
#include "anabranch/router.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Maximum number of experts of the router; a call with more returns AB_UNSUPPORTED. */
#define AB_CUDA_MAX_EXPERTS 8192

/* Writes "key=value" lines: version, cuda (the version of the runtime), driver, and for each device its properties
 * and the kernels that the experts try first on it; or error=REASON if no device can be used. */
AB_API void ab_cuda_describe(char* text, size_t size);

/* Tensors, options and errors are those of router.h, with at most AB_CUDA_MAX_EXPERTS experts. The fast kernels
 * serve up to 1024 experts and 64 experts per token. Beyond that, both passes use a slower kernel with one warp per
 * token. Its forward pass returns AB_UNSUPPORTED if the experts and outputs of one token do not fit in the shared
 * memory of an SM. */
AB_API ab_status ab_cuda_router_forward(const ab_router_forward_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_router_forward_workspace(const ab_router_forward_args* args, const ab_exec* exec,
                                                  size_t* bytes);
/* Workspace: [T, K] int32 if the selection is given in any other form, else none. */
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

/* Tensors, dtypes and errors are those of dispatch.h. None of these four operations needs a workspace. Results equal
 * those of the CPU bit for bit (except NaN payloads); only d_weights is summed in float32 in a different order,
 * which is the same on every run. Rows that begin at multiples of 16 bytes are fastest; any other address and width
 * is supported. */
AB_API ab_status ab_cuda_dispatch(const ab_dispatch_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_combine(const ab_combine_args* args, const ab_exec* exec);
/* Reads d_out and rows once for both gradients if d_out, rows and d_rows have one dtype; else in two passes. */
AB_API ab_status ab_cuda_combine_backward(const ab_combine_backward_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_expand_row_id_map(const ab_expand_row_id_map_args* args, const ab_exec* exec);

/* Requires S < 2^31; else returns AB_UNSUPPORTED. */
AB_API ab_status ab_cuda_sort_chunks(const ab_sort_chunks_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_sort_chunks_workspace(const ab_sort_chunks_args* args, const ab_exec* exec, size_t* bytes);

/* Supported on every GPU of compute capability 8.0 or newer. */
AB_API ab_status ab_cuda_quantize_rows(const ab_quantize_rows_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_quantize_rows_workspace(const ab_quantize_rows_args* args, const ab_exec* exec, size_t* bytes);
AB_API ab_status ab_cuda_pack_mxfp4(const ab_pack_mxfp4_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_pack_mxfp4_workspace(const ab_pack_mxfp4_args* args, const ab_exec* exec, size_t* bytes);
AB_API ab_status ab_cuda_unpack(const ab_unpack_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_unpack_workspace(const ab_unpack_args* args, const ab_exec* exec, size_t* bytes);
AB_API ab_status ab_cuda_quantize_weights(const ab_quantize_weights_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_quantize_weights_workspace(const ab_quantize_weights_args* args, const ab_exec* exec,
                                                    size_t* bytes);

/* The grouped GEMM runs on the first set of kernels that supports the call:
 *   hopper    compute capability 9.0; bfloat16 and float16; rows of x, w and y are whole 16-byte chunks at aligned
 *             addresses.
 *   portable  the sm80 path (mma.sync) for every device; float32, bfloat16 and float16; any width and address, fastest
 *             if rows are such chunks. Float32 is multiplied as float32, by three TF32 GEMMs, or with
 *             AB_PRECISION_TF32 by one.
 * Both count rows, columns and tiles in int32: 2^30 or more of any of these returns AB_UNSUPPORTED with a message
 * that names the size. ANABRANCH_CUDA_PATH=portable in the environment, read once, excludes hopper.
 *
 * AB_PRECISION_FP8 requires the hopper kernels: compute capability 9.0, operands at addresses that are multiples of
 * 16, and 16-bit results and saved tensors; else the call returns AB_UNSUPPORTED. Sums over 128 elements have the
 * precision of the FP8 tensor cores, which is at least 14 bits; sums over blocks are float32.
 * ab_cuda_expert_ffn_forward returns `a` quantised or not at all; no 16-bit copy of `a` exists. Workspace: for each
 * operand that the operation quantises, its elements and 4 bytes per block. `a` and dh are divided by their scales
 * through a reciprocal: a quotient that is halfway between two e4m3 values, to within 24 bits, may round to either. */
AB_API ab_status ab_cuda_grouped_matmul(const ab_grouped_matmul_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_grouped_matmul_workspace(const ab_grouped_matmul_args* args, const ab_exec* exec,
                                                  size_t* bytes);

/* Uses the kernels above. A sum over more rows than a bound that depends on shapes alone is split, and the partial
 * sums are added in order. Workspace: at most 144 MiB and 16 bytes per expert. If x and d_y have different dtypes,
 * each one that is not float32 is converted to float32 in the workspace. d_w is also converted through the workspace
 * if its dtype is neither float32 nor the dtype of the GEMM. */
AB_API ab_status ab_cuda_grouped_matmul_dw(const ab_grouped_matmul_dw_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_grouped_matmul_dw_workspace(const ab_grouped_matmul_dw_args* args, const ab_exec* exec,
                                                     size_t* bytes);

/* Works in chunks of columns: the GEMM of all rows with some columns of w, then the sums of these columns, then the
 * next chunk. The result has the same bits as ab_cuda_grouped_matmul, or the matching GEMM of the feed-forward
 * network, followed by ab_cuda_combine.
 *
 * Workspace: [R, C] of the dtype of x, or with AB_PRECISION_FP8 of the dtype of out. C follows from a limit W on the
 * elements. W is the number of elements of w, or twice that in a forward pass with R <= E N (the size of a gated
 * W_in), but at least 2^22. If R N <= W or N < 2048, C = N. Else C = min(N, t ceil(n / chunks)) with n = ceil(N / t)
 * tiles, where chunks is the smallest number that satisfies R C <= W, but at most floor(n / 4). t = 256 with
 * AB_PRECISION_FP8, or with backward and D >= 1536; else t = 192. */
AB_API ab_status ab_cuda_grouped_matmul_combine(const ab_grouped_matmul_combine_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_grouped_matmul_combine_workspace(const ab_grouped_matmul_combine_args* args,
                                                          const ab_exec* exec, size_t* bytes);

/* Uses the kernels above, including gathers, biases, activations, weights and padding. The hopper kernels require
 * that D and F are multiples of 8 and that all matrices and biases begin at multiples of 16 bytes. If the dtype of
 * d_out differs from that of x, d_out is first rounded to the dtype of x in the workspace; with AB_PRECISION_FP8,
 * Q(d_out) quantises the original d_out. Results equal those of the CPU up to the order of float32 additions and the
 * last bits of the exponential. On the sm80 path, a float32 operand that is infinite, or within a relative 2^-12 of
 * overflow, gives NaN. If two rows have the same slot, which no plan produces, d_weights of that slot is the value
 * of one of them.
 *
 * Workspace of the forward pass: [R, F] of the dtype of x, if `a` is not given. Workspace of the backward pass: w a,
 * [R, F] of the dtype of x, if d_w_out is requested and weighted_a is not given; dh, [R, P, F], if a requested
 * output needs it and it is not given; d_out in the dtype of x, if its dtype differs; and the largest requirement of
 * any single step:
 *   - d_weights: ceil(F / 128) R floats;
 *   - d_b_in, d_b_out: (ceil(R / 512) + E) P F and (ceil(R / 512) + E) D floats;
 *   - d_w_in, d_w_out: the workspace of ab_cuda_grouped_matmul_dw for the same GEMM.
 *
 * Packed weights are unpacked to the dtype of x in the workspace, for as many experts at once as fit 512 MiB, but at
 * least for one. Those of experts without rows are not unpacked. ab_cuda_grouped_matmul_combine does the same. */
AB_API ab_status ab_cuda_expert_ffn_forward(const ab_expert_ffn_forward_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_expert_ffn_forward_workspace(const ab_expert_ffn_forward_args* args, const ab_exec* exec,
                                                      size_t* bytes);
AB_API ab_status ab_cuda_expert_ffn_backward(const ab_expert_ffn_backward_args* args, const ab_exec* exec);
AB_API ab_status ab_cuda_expert_ffn_backward_workspace(const ab_expert_ffn_backward_args* args, const ab_exec* exec,
                                                       size_t* bytes);

/* Reports which kernels run the experts of a layer on the current device. *path lists those of "few_rows" (small-M
 * GEMMs, see below), "hopper" and "portable" that run, in this order, joined by +. *unsupported_reason says why the
 * hopper kernels do not run if portable ones do, else it is NULL. The argument unsupported_reason itself may be
 * NULL. Both texts are static.
 *
 * The layer has T K rows without alignment, and operands of one dtype (float16, bfloat16 or float32, an ab_dtype)
 * that begin at multiples of 16 bytes. An operation itself checks its own operands. P is 2 for gated experts, else
 * 1. The flags are 0 or 1. w_in_transposed: D is innermost in the memory of W_in. w_out_transposed: F is innermost
 * in the memory of W_out. backward: 1 covers the forward and the backward pass, 0 the forward pass alone.
 *
 * The few_rows kernels run on every device. They serve GEMMs with at most 4 rows per expert on average whose
 * elements have 16 bits, whose rows are whole 16-byte chunks and whose weights are K-major (the contraction is
 * innermost). */
AB_API ab_status ab_cuda_experts_path(int32_t dtype, int64_t T, int64_t K, int64_t E, int64_t D, int64_t P, int64_t F,
                                      int32_t w_in_transposed, int32_t w_out_transposed, int32_t backward,
                                      const char** path, const char** unsupported_reason);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_CUDA_H_ */
