/* The experts: grouped GEMMs and the gated feed-forward network, forward and backward.
 *
 * Sizes: T tokens, E experts, K = topk experts per token, D model width, F expert width, R rows, P parts of W_in: 2
 * (gate, up) for a gated expert, 1 for an ungated one.
 *
 * The rows of one expert are contiguous: group_sizes[e] rows per expert, in device memory. Negative sizes count as 0
 * and sizes past R are clipped, so no content of group_sizes causes an access out of bounds. Rows past the sum of
 * the sizes are zero in every output, unless skip_rest is set because nobody reads them, and contribute to no gradient.
 *
 * Floating-point tensors named x, w, y, h and their gradients have one dtype: float32, bfloat16 or float16.
 * Cotangents (d_y, d_out) and weights of rows may have any of the three. GEMMs accumulate in float32. bfloat16 GEMMs
 * use bfloat16 instructions if the CPU has them (AVX-512-BF16 or AMX); elsewhere tiles are converted to float32. The
 * environment variable ANABRANCH_BF16 = native | convert overrides that choice. If it requests instructions that the
 * CPU lacks, every call with a bfloat16 GEMM returns AB_UNSUPPORTED. The bfloat16 instructions treat denormal
 * operands and results as 0; "convert" preserves denormals.
 *
 * The weights of the feed-forward network may be stored in orders other than row-major, described by strides. W_in
 * [E, D, P, F] may be stored as (E, D, P, F); (E, P, F, D), as PyTorch's Linear does; (E, D, F, P), with gate and up
 * interleaved; or (E, F, P, D), both. W_out [E, F, D] may be stored as (E, F, D) or (E, D, F). Gradients have the
 * layout of their weights. If gate and up are interleaved, b_in, h, dh and d_b_in also have F before P in memory. No
 * call copies or transposes weights.
 *
 * Packed weights: w_in and w_out, each by itself, may be stored in fewer bits, with one scale per block. A call then
 * computes what it computes with the weights that ab_unpack writes in the dtype of x, bitwise the same on the CPU. The
 * contraction of the forward GEMM must be innermost in memory: W_in is stored as (E, P, F, D) or (E, F, P, D), W_out as
 * (E, D, F). Scales have the axes of their weight, in its order. Packed weights have no gradient.
 *
 *   dtype of the weight   block    scales                           value
 *   AB_FLOAT4_E2M1X2      32       AB_FLOAT8_E8M0                   element * scale (MXFP4)
 *   AB_FLOAT8_E4M3        128x128  float32, bfloat16 or             element * scale, rounded to float32 (FP8 blocks);
 *                                  AB_FLOAT8_E8M0                   W_in as (E, P, F, D) only
 *
 * The dimension that is innermost must be a multiple of its block; with FP8 blocks D and F must both be multiples of
 * 128. Scales of bytes may be AB_UINT8 instead of AB_FLOAT8_E8M0. With AB_PRECISION_FP8 weights are not packed: FP8
 * blocks with float32 scales are quantised weights then, w_in_q and w_out_q. */
#ifndef ANABRANCH_EXPERTS_H_
#define ANABRANCH_EXPERTS_H_

#include "anabranch/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* act(h) of an intermediate column; for a gated expert, act of the gate times up. The last four functions have two
 * inputs, gate g and up u, and require gated experts: g' = min(g, limit), u' = clamp(u, -limit, limit), with slope 1
 * up to and including the limit. Their parameters activation_alpha and activation_limit are finite and positive; a
 * parameter that the function does not use is 0. */
typedef enum ab_activation {
  AB_SILU = 0,              /* h / (1 + exp(-h)) */
  AB_GELU = 1,              /* h/2 (1 + tanh(sqrt(2/pi) (h + 0.044715 h^3))) */
  AB_RELU = 2,              /* max(h, 0), slope 0 at 0 */
  AB_RELU2 = 3,             /* max(h, 0)^2 */
  AB_GELU_ERF = 4,          /* h/2 (1 + erf(h / sqrt(2))) */
  AB_QUICK_GELU = 5,        /* h / (1 + exp(-1.702 h)) */
  AB_LINEAR = 6,            /* h */
  AB_SWIGLU_CLAMPED = 7,    /* silu(g') u' */
  AB_SWIGLU_OAI = 8,        /* g' / (1 + exp(-alpha g')) (u' + 1) */
  AB_SWIGLU_THEN_CLAMP = 9, /* min(silu(g), limit) u' */
  AB_SITU = 10              /* alpha tanh(g / alpha) / (1 + exp(-g)) limit tanh(u / limit) */
} ab_activation;

/* How a GEMM multiplies float32 operands. bfloat16 and float16 operands are always multiplied as they are. Sums are
 * float32 in every mode. */
typedef enum ab_precision {
  /* As float32. Tensor cores split each operand into parts and sum the products of the parts, with an error at the
   * level of float32. */
  AB_PRECISION_HIGHEST = 0,
  /* A GPU may round operands to TF32, which has a 10-bit mantissa: each operand to within a relative 2^-10. A CPU,
   * and a kernel without such instructions, multiplies as with HIGHEST. */
  AB_PRECISION_TF32 = 1,
  /* Both operands of GEMMs such as y = x w are quantised (see below), whatever their dtype. Gradients of weights use
   * operands that are not quantised, with float32 operands as in HIGHEST. Widths (D, F, N) must be multiples of 128. */
  AB_PRECISION_FP8 = 2
} ab_precision;

/* How the scale of a block follows from its largest magnitude, in an operation with AB_PRECISION_FP8; else 0. */
typedef enum ab_fp8_scales {
  AB_FP8_SCALES_FLOAT32 = 0,
  AB_FP8_SCALES_POWER_OF_TWO = 1 /* rounded up to a power of two */
} ab_fp8_scales;

/* Quantised tensors: a tensor q of AB_FLOAT8_E4M3 and a float32 tensor with one scale per block. A block is 128
 * consecutive elements of one row of x, or 128 x 128 elements of the matrix of one expert; in W_in [E, D, P, F] a
 * block is within one part. The value is q * scale. Every backend computes the same bits, in float32 with denormals,
 * each operation rounded to nearest even:
 *
 *     m = max |v| over the block;
 *     scale = max(m / 448, 2^-126), or 1 if m = 0; POWER_OF_TWO: the smallest power of two that is not below that;
 *     q = v / scale, a division, then rounded to nearest even to e4m3; it never exceeds 448. -0 stays -0.
 *
 * A block with a NaN or an infinity has the scale NaN (0x7fc00000) and q = NaN (0x7f) everywhere. Such a block of a
 * row makes the results of that row NaN; such a block of a weight makes its columns NaN in all rows.
 *
 * GEMM operands must be K-major: the contraction is contiguous (w_q), since FP8 tensor cores accept no other layout.
 * Scales have the layout of the original weights in either case. An operand that is not given quantised is quantised
 * in the workspace. */

/* Quantises rows: q and scales. */
typedef struct ab_quantize_rows_args {
  size_t size;
  int32_t fp8_scales;      /* ab_fp8_scales */
  const ab_tensor* x;      /* [R, D] float, D a multiple of 128 */
  const ab_tensor* q;      /* [R, D] e4m3 */
  const ab_tensor* scales; /* [R, D/128] float32 */
} ab_quantize_rows_args;

AB_API ab_status ab_quantize_rows(const ab_quantize_rows_args* args, const ab_exec* exec);
AB_API ab_status ab_quantize_rows_workspace(const ab_quantize_rows_args* args, const ab_exec* exec, size_t* bytes);

/* Quantises weights: as they are and transposed; at least one of q and q_transposed is required. w may have any
 * layout that the network accepts for weights, [E, D, N] those of W_out; the outputs are row-major. */
typedef struct ab_quantize_weights_args {
  size_t size;
  int32_t fp8_scales;            /* ab_fp8_scales */
  const ab_tensor* w;            /* [E, D, N] or [E, D, P, F] float; D, N and F multiples of 128 */
  const ab_tensor* q;            /* [E, D, N] or [E, D, P, F] e4m3, or NULL */
  const ab_tensor* q_transposed; /* [E, N, D] or [E, P, F, D] e4m3, or NULL */
  const ab_tensor* scales;       /* [E, D/128, N/128] or [E, D/128, P, F/128] float32 */
} ab_quantize_weights_args;

AB_API ab_status ab_quantize_weights(const ab_quantize_weights_args* args, const ab_exec* exec);
AB_API ab_status ab_quantize_weights_workspace(const ab_quantize_weights_args* args, const ab_exec* exec,
                                               size_t* bytes);

/* Packs weights as MXFP4. Per block of 32 elements v along the last axis, with m = max |v|:
 *
 *     k = floor(log2 m) - 2 (FLOOR, the rule of OCP) or ceil(log2(m / 6)) (CEIL), clamped to [-127, 127];
 *     scale = 2^k; element = v / 2^k, rounded to nearest, ties to even, and at most 6 in magnitude. -0 stays -0.
 *
 * m = 0: the scale is 2^-127. A block with a NaN or an infinity has the scale NaN (255), and all its codes are 0. */
typedef enum ab_mxfp4_scales { AB_MXFP4_SCALES_FLOOR = 0, AB_MXFP4_SCALES_CEIL = 1 } ab_mxfp4_scales;

typedef struct ab_pack_mxfp4_args {
  size_t size;
  int32_t scale_rule;      /* ab_mxfp4_scales */
  const ab_tensor* w;      /* [M, C] float, C a multiple of 32 */
  const ab_tensor* codes;  /* [M, C] AB_FLOAT4_E2M1X2 */
  const ab_tensor* scales; /* [M, C/32] AB_FLOAT8_E8M0 or AB_UINT8 */
} ab_pack_mxfp4_args;

AB_API ab_status ab_pack_mxfp4(const ab_pack_mxfp4_args* args, const ab_exec* exec);
AB_API ab_status ab_pack_mxfp4_workspace(const ab_pack_mxfp4_args* args, const ab_exec* exec, size_t* bytes);

/* Unpacks weights: MXFP4 or FP8 blocks, see above. Values are rounded to nearest even to the dtype of w. */
typedef struct ab_unpack_args {
  size_t size;
  const ab_tensor*
      packed; /* [M, N, C] AB_FLOAT4_E2M1X2, C a multiple of 32, or AB_FLOAT8_E4M3, N and C multiples of 128 */
  const ab_tensor* scales; /* [M, N, C/32], or [M, N/128, C/128] */
  const ab_tensor* w;      /* [M, N, C] float */
} ab_unpack_args;

AB_API ab_status ab_unpack(const ab_unpack_args* args, const ab_exec* exec);
AB_API ab_status ab_unpack_workspace(const ab_unpack_args* args, const ab_exec* exec, size_t* bytes);

/* Low-rank adapters (LoRA). The factors A [E, D, r] and B [E, r, N] of an adapter add scale A[e] B[e] to the matrix
 * w[e] of a GEMM, without forming that sum:
 *
 *     u = scale x A[e], rounded to the dtype of x;   y = x w[e] + u B[e].
 *
 * Both GEMMs of y share one float32 sum, w first. A first axis of 1 in place of E is one factor for all experts; each
 * factor decides for itself. r is any number from 1 on. Factors have the dtype of x or float32, and any strides;
 * float32 factors of 16-bit rows are rounded to the dtype of x where they multiply. Precision applies to u as to y,
 * but with AB_PRECISION_FP8 only x w[e] is quantised: factors and u are not, and u is computed from x as it is. The
 * workspace contains u if it is not given, and copies of factors that are not packed or not of the dtype of x. A factor
 * and its transposed view give the same bits.
 *
 * Without A, the call reads u, which an earlier call wrote. Then scale is 0; it is also 0 without an adapter. */

/* y = x w[e] on the rows of expert e; with transpose_w, y = x w[e]^T. With AB_PRECISION_FP8 w may have any float
 * dtype and x may be quantised; if x is quantised, y may have any float dtype, too.
 *
 * The gradient of x is a call with d_y, the transposed w, and the factors B^T and A^T; its u is v = scale d_y B^T. The
 * gradients of A and B are x^T v and u^T d_y, see ab_grouped_matmul_dw. */
typedef struct ab_grouped_matmul_args {
  size_t size;
  int32_t transpose_w;
  const ab_tensor* x;           /* [R, D]; e4m3 if x_scales is given */
  const ab_tensor* w;           /* [E, D, N]; with transpose_w [E, N, D]; may be NULL if w_q is given, which is read
                                 * instead */
  const ab_tensor* group_sizes; /* [E] int32 */
  const ab_tensor* y;           /* [R, N] */
  int32_t precision;            /* ab_precision */
  int32_t fp8_scales;           /* ab_fp8_scales */
  const ab_tensor* x_scales;    /* [R, D/128] float32, or NULL */
  const ab_tensor* w_q;         /* [E, N, D] e4m3, together with w_scales, or NULL */
  const ab_tensor* w_scales;    /* [E, D/128, N/128] float32; with transpose_w [E, N/128, D/128] */
  /* adapter, or NULL */
  float lora_scale;        /* finite */
  const ab_tensor* lora_a; /* [E or 1, D, r], not with quantised x */
  const ab_tensor* lora_b; /* [E or 1, r, N] */
  const ab_tensor* lora_u; /* [R, r] of the dtype of x, or of y if x is quantised: with lora_a an output or NULL, else
                            * an input */
} ab_grouped_matmul_args;

AB_API ab_status ab_grouped_matmul(const ab_grouped_matmul_args* args, const ab_exec* exec);
AB_API ab_status ab_grouped_matmul_workspace(const ab_grouped_matmul_args* args, const ab_exec* exec, size_t* bytes);

/* dw[e] = x^T d_y over the rows of expert e, summed in float32; zero for an expert without rows. Both operands may
 * have any float dtype. For weights stored transposed, swap x and d_y. If all experts share one matrix, d_w has a first
 * axis of 1 and is the sum over the experts in ascending order. */
typedef struct ab_grouped_matmul_dw_args {
  size_t size;
  int32_t accumulate;           /* 1: adds to d_w, which must be float32 then */
  const ab_tensor* x;           /* [R, D] */
  const ab_tensor* d_y;         /* [R, N] */
  const ab_tensor* group_sizes; /* [E] int32 */
  const ab_tensor* d_w;         /* [E or 1, D, N], any float dtype */
  int32_t precision;            /* ab_precision, but not FP8 */
  int32_t reserved;             /* 0; reserved for a later option */
} ab_grouped_matmul_dw_args;

AB_API ab_status ab_grouped_matmul_dw(const ab_grouped_matmul_dw_args* args, const ab_exec* exec);
AB_API ab_status ab_grouped_matmul_dw_workspace(const ab_grouped_matmul_dw_args* args, const ab_exec* exec,
                                                size_t* bytes);

/* A grouped GEMM whose rows are summed per token; a GPU needs no buffer for all rows. On the rows of expert e
 *
 *     rows = x w[e] + bias[e], or with transpose_w x w[e]^T + bias[e], rounded to the dtype of x, or if that is e4m3
 *            to the dtype of out;
 *     out[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]], plus addend[t].
 *
 * The result equals, bit for bit, what ab_expert_ffn_forward computes from `a`, or ab_expert_ffn_backward from dh,
 * followed by ab_combine.
 *
 * With weight_early x already contains the weights: the weight of the row, found through slot_of_row, multiplies the
 * bias, and the sum applies no weights. Rows whose slot_of_row is outside [0, T K) are padding and count as zeros,
 * whatever x and w contain; so do rows past the groups. With skip_rest the caller guarantees that row_of_slot names
 * no such row, as in the arrays of a plan, and no zeros are written for them; if it names one nevertheless, out has
 * an unspecified value there.
 *
 * Sums are float32: slots in ascending order, then the addend, rounded once to the dtype of out. out may be the
 * addend itself, with the same address and dtype; otherwise the two must not overlap.
 *
 * Workspace: [R, N] of the dtype of rows, and some MiB per thread. On a GPU the workspace has only as many columns
 * as fit in the memory of the weight gradients: the backward pass of a network has memory for one buffer of the size
 * of w, the forward pass for both.
 *
 * With AB_PRECISION_FP8 x may be a quantised output of ab_expert_ffn_forward (a with a_scales) or
 * ab_expert_ffn_backward (dh_q with dh_scales, viewed as [R, P F]). The latter have P before F, so w_q must have it
 * too; no block mixes gate and up.
 *
 * w may be packed, with w_block_scales; its last axis is innermost in memory. */
typedef struct ab_grouped_matmul_combine_args {
  size_t size;
  int32_t transpose_w;
  int32_t weight_early;         /* 1: requires weights */
  int32_t skip_rest;            /* 1: row_of_slot names only rows that have a slot; see above */
  const ab_tensor* x;           /* [R, D]; e4m3 if x_scales is given */
  const ab_tensor* w;           /* [E, D, N]; with transpose_w [E, N, D]; may be NULL if w_q is given, which is read
                                 * instead */
  const ab_tensor* group_sizes; /* [E] int32 */
  const ab_tensor* bias;        /* [E, N] of the dtype of rows, or NULL */
  const ab_tensor* slot_of_row; /* [R] int32 */
  const ab_tensor* row_of_slot; /* [T, K] int32 */
  const ab_tensor* weights;     /* [T, K] float, or NULL: ones */
  const ab_tensor* addend;      /* [T, N] float, or NULL: zeros */
  const ab_tensor* out;         /* [T, N] float */
  int32_t backward;             /* 1: rows are gradients; affects only the size of the workspace, see above */
  int32_t precision;            /* ab_precision */
  int32_t fp8_scales;           /* ab_fp8_scales */
  const ab_tensor* x_scales;    /* [R, D/128] float32, or NULL */
  const ab_tensor* w_q;         /* [E, N, D] e4m3, together with w_scales, or NULL */
  const ab_tensor* w_scales;    /* [E, D/128, N/128] float32; with transpose_w [E, N/128, D/128] */
  /* adapter, or NULL; it is part of rows */
  float lora_scale;                /* finite */
  const ab_tensor* lora_a;         /* [E or 1, D, r], not with quantised x */
  const ab_tensor* lora_b;         /* [E or 1, r, N] */
  const ab_tensor* lora_u;         /* [R, r] of the dtype of rows: with lora_a an output or NULL, else an input */
  const ab_tensor* w_block_scales; /* of packed w [E, M, C]: [E, M, C/32], or [E, M/128, C/128]; or NULL */
  /* Only on GPUs, or NULL. `out` then has T = P T' rows, T' per rank of this exchange. Chunks of columns are sent to
   * their ranks while the next chunk is computed. ab_cuda_exchange_sum must follow; it adds up the sums that arrive.
   * The layout of `out` is internal: only ab_cuda_exchange_sum reads it. */
  ab_exchange* returning;
  int32_t returning_buffer; /* the buffer that the sums arrive in; at least as large as `out` */
  int32_t returning_reserved;
} ab_grouped_matmul_combine_args;

AB_API ab_status ab_grouped_matmul_combine(const ab_grouped_matmul_combine_args* args, const ab_exec* exec);
AB_API ab_status ab_grouped_matmul_combine_workspace(const ab_grouped_matmul_combine_args* args, const ab_exec* exec,
                                                     size_t* bytes);

/* h = x W_in[e] + b_in[e];  a = phi(h_gate, h_up), or act(h) ungated;  y = a W_out[e] + b_out[e].
 *
 * With slot_of_row, x contains tokens: row r reads token slot_of_row[r] / K. A row whose entry is outside [0, T K)
 * is padding and is zero in y and h. Without slot_of_row, x contains the rows themselves. Weights multiply y, or
 * with weight_early a and b_out. `a` is computed in float32 from h before h is rounded, then rounded to the dtype of
 * x.
 *
 * If y is NULL and a is given, the call computes the first half alone, for ab_grouped_matmul_combine: it takes no
 * w_out and no b_out, and weights only together with weight_early.
 *
 * Workspace: [R, F] of the dtype of x if a is not given, and some MiB per thread.
 *
 * With AB_PRECISION_FP8 h = Q(x) Q(W_in), where x is quantised before rows are gathered, and y = Q(a) Q(W_out),
 * where `a`, times an early weight, is quantised from float32. The output `a` is rounded to the dtype of x or, with
 * a_scales, quantised. Quantised weights have P before F, whatever the order of w_in. w_in and w_out may be NULL if
 * quantised weights are given, which are read instead; without w_in, gate and up are side by side in b_in and h.
 * w_in and w_out may have any float dtype, forward and backward. x may be NULL if x_q is given, which is read
 * instead; the dtype of x is then the common dtype of y, h, b_in, lora_z and an `a` that is not quantised.
 *
 * W_in and W_out may have adapters, both or one of them:
 *
 *     u = scale_in x A_in[e];   z = scale_out a A_out[e];   both rounded to the dtype of x,
 *     h = x W_in[e] + u B_in[e] + b_in[e];   y = a W_out[e] + z B_out[e] + b_out[e].
 *
 * With an early weight, `a` and so z contain it; with a late one it multiplies y. z is computed from the rounded `a`,
 * also with AB_PRECISION_FP8. u is an output for the backward pass. z is one for ab_grouped_matmul_combine, which
 * takes it as its lora_u: without y, an adapter of W_out requires z. An adapter of W_in requires x. The axes of B_in
 * are in the order of its strides, whatever the order of W_in. The workspace contains u and z if they are not given.
 *
 * A copy of a factor has the factor's shape and the dtype of x. In memory its experts are outermost and it has no gaps.
 * The copy of a factor that is not shared has undefined values for experts without rows. The backward pass and
 * ab_grouped_matmul_combine take copies as their factors. If a copy has its axes in the order of its weight, with
 * AB_PRECISION_FP8 A as [D, r] and B as [N, r], a GPU makes no further copy of that factor. */
typedef struct ab_expert_ffn_forward_args {
  size_t size;
  int32_t activation;   /* ab_activation */
  int32_t weight_early; /* 1: weights multiply before W_out */
  int32_t topk;         /* K with slot_of_row, else 0 */
  int32_t skip_rest;    /* 1: tail rows past the groups may have any value in h and a */
  /* inputs */
  const ab_tensor* x;           /* [T, D] with slot_of_row, else [R, D] */
  const ab_tensor* slot_of_row; /* [R] int32, or NULL */
  const ab_tensor* group_sizes; /* [E] int32 */
  const ab_tensor* w_in;        /* [E, D, P, F] */
  const ab_tensor* b_in;        /* [E, P, F], or NULL */
  const ab_tensor* w_out;       /* [E, F, D]; NULL if y is NULL */
  const ab_tensor* b_out;       /* [E, D], or NULL */
  const ab_tensor* weights;     /* float [T, K] with slot_of_row, else [R]; NULL: 1 */
  /* outputs */
  const ab_tensor* y; /* [R, D]; may be NULL if a is given */
  const ab_tensor* h; /* [R, P, F], or NULL: saved for the backward pass */
  const ab_tensor* a; /* [R, F], or NULL; zero in padding rows */
  /* parameters of the activation, see ab_activation */
  float activation_alpha;
  float activation_limit;
  int32_t precision;  /* ab_precision */
  int32_t fp8_scales; /* ab_fp8_scales */
  /* quantised inputs: each tensor with its scales, or NULL */
  const ab_tensor* w_in_q;       /* [E, P, F, D] e4m3 */
  const ab_tensor* w_in_scales;  /* [E, D/128, P, F/128] float32 */
  const ab_tensor* w_out_q;      /* [E, D, F] e4m3; NULL if y is NULL */
  const ab_tensor* w_out_scales; /* [E, F/128, D/128] float32 */
  /* output */
  const ab_tensor* a_scales; /* [R, F/128] float32; a is e4m3 then; or NULL. 1 in padding rows */
  /* quantised inputs, or both NULL */
  const ab_tensor* x_q;      /* e4m3, the shape of x */
  const ab_tensor* x_scales; /* [T, D/128] with slot_of_row, else [R, D/128], float32 */
  /* adapters: each a pair, or both NULL */
  float lora_scale_in; /* finite */
  float lora_scale_out;
  const ab_tensor* lora_a_in;  /* [E or 1, D, r] */
  const ab_tensor* lora_b_in;  /* [E or 1, r, P, F] */
  const ab_tensor* lora_a_out; /* [E or 1, F, q] */
  const ab_tensor* lora_b_out; /* [E or 1, q, D] */
  /* outputs, or NULL; zero in padding rows */
  const ab_tensor* lora_u; /* [R, r] */
  const ab_tensor* lora_z; /* [R, q] */
  /* outputs, or NULL: copies of the factors in the dtype of x, for the backward pass */
  const ab_tensor* lora_a_in_copy;
  const ab_tensor* lora_b_in_copy;
  const ab_tensor* lora_a_out_copy;
  const ab_tensor* lora_b_out_copy;
  /* scales of packed weights, or NULL */
  const ab_tensor* w_in_block_scales;  /* [E, D/32, P, F], or [E, D/128, P, F/128], in the order of w_in */
  const ab_tensor* w_out_block_scales; /* [E, F/32, D], or [E, F/128, D/128], in the order of w_out */
  /* Only on GPUs, or NULL. x must be the memory of a buffer of this exchange to which a started all_gather sends it.
   * The call replaces AB_EXCHANGE_FINISH, which is still due if it fails. It may compute rows of tokens before all
   * tokens have arrived. So the rows of an expert must have ascending slots, as those of ab_plan; otherwise results are
   * wrong. */
  ab_exchange* arriving;
  int32_t arriving_buffer;
  int32_t arriving_reserved;
} ab_expert_ffn_forward_args;

AB_API ab_status ab_expert_ffn_forward(const ab_expert_ffn_forward_args* args, const ab_exec* exec);
AB_API ab_status ab_expert_ffn_forward_workspace(const ab_expert_ffn_forward_args* args, const ab_exec* exec,
                                                 size_t* bytes);

/* With d_y = d_out of the row's token, unweighted, and w the row's weight (1 without weights):
 *
 *     da' = d_y W_out[e]^T;  d_w = <da', a> + <d_y, b_out[e]>;  da = w da';  dh = phi'(h) da;
 *     dW_out = (w a)^T d_y;  db_out = sum w d_y;  dW_in = x^T dh;  db_in = sum dh;  dx = dh W_in^T.
 *
 * The formulas hold for early and late weights. Memory: dh may be the buffer of h, which it then overwrites. The
 * workspace contains w a, [R, F] of the dtype of x, if d_w_out is requested and weighted_a is not given; dh, [R, P,
 * F], if a requested output needs it and it is not given; and some MiB per thread. If dh overwrites h, the peak is
 * the weights, gradients, x, h and two row buffers (w a and dx_rows). Without dx_rows, which
 * ab_grouped_matmul_combine sums as it computes them from dh, the only row buffer is w a.
 *
 * The work may be split into several calls. The first returns dh, weighted_a and d_weights. Later calls, without h,
 * read dh or weighted_a and return the other outputs. They ignore the content of padding rows of dh and weighted_a,
 * which must be finite. If d_w_out is also computed first, and d_w_in last, then w a and the workspace of an
 * ab_grouped_matmul_combine between the two can use the memory of d_w_in, if it is large enough and not accumulated
 * into.
 *
 * d_w_in and d_w_out each have the dtype of x or are float32. To sum gradients over several batches, make them
 * float32 and set accumulate.
 *
 * With AB_PRECISION_FP8 da' = Q(d_out) Q(W_out)^T, where d_out is quantised before rows are gathered, and dx = Q(dh)
 * Q(W_in)^T, where dh is quantised after it was rounded to its dtype; the other formulas do not change. Quantised
 * weights, dh_q and dh_scales have P before F, whatever the order of w_in. w_in and w_out may be NULL if quantised
 * weights are given. For dx_rows, a call without h reads dh_q and dh_scales if they are given; else it quantises dh.
 * Q(d_out) is d_out_q if that is given; d_out is still required for everything else.
 *
 * With adapters, where u, z, v_out and v_in are rounded to the dtype of x:
 *
 *     v_out = scale_out d_y B_out[e]^T;   da' = d_y W_out[e]^T + v_out A_out[e]^T;   z = scale_out (w a) A_out[e];
 *     v_in = scale_in dh B_in[e]^T;       dx = dh W_in[e]^T + v_in A_in[e]^T;        u = scale_in x A_in[e];
 *     dA_out = (w a)^T v_out;   dB_out = z^T d_y;   dA_in = x^T v_in;   dB_in = u^T dh.
 *
 * Gradients of factors have the shapes of the factors, and their dtypes or float32. They are row-major, and are float32
 * sums before they are rounded. The gradient of a shared factor is the sum over the experts in ascending order. v_in is
 * also the lora_u of the ab_grouped_matmul_combine that sums dx. v_in and v_out are outputs of the call that reads h
 * and inputs of later ones, which compute again what they need and do not get. The workspace contains u, z, v_in and
 * v_out if they are needed and not given. */
typedef struct ab_expert_ffn_backward_args {
  size_t size;
  int32_t activation;
  int32_t topk;       /* K with slot_of_row, else 0 */
  int32_t accumulate; /* 1: adds to d_w_in, d_w_out and gradients of factors; at least one of these is requested, and
                       * they are float32 */
  int32_t skip_rest;  /* 1: tail rows past the groups may have any value in dh and weighted_a */
  /* inputs and residuals of the forward pass */
  const ab_tensor* x;           /* [T, D] with slot_of_row, else [R, D] */
  const ab_tensor* slot_of_row; /* [R] int32, or NULL */
  const ab_tensor* group_sizes; /* [E] int32 */
  const ab_tensor* w_in;        /* [E, D, P, F] */
  const ab_tensor* w_out;       /* [E, F, D] */
  const ab_tensor* b_out;       /* [E, D], or NULL; enters d_weights only */
  const ab_tensor* weights;     /* float [T, K] with slot_of_row, else [R]; NULL: 1 */
  const ab_tensor* h;           /* [R, P, F]; NULL if dh or weighted_a, whichever is needed, is already given */
  /* cotangent */
  const ab_tensor* d_out; /* float [T, D] with slot_of_row, else [R, D]; NULL without h, d_w_out, d_b_out, d_lora_a_out
                           * and d_lora_b_out */
  /* outputs; each may be NULL: not requested */
  const ab_tensor* dh;         /* [R, P, F]; may share the memory of h */
  const ab_tensor* dx_rows;    /* [R, D] */
  const ab_tensor* d_w_in;     /* [E, D, P, F]; the dtype of x or float32 */
  const ab_tensor* d_b_in;     /* [E, P, F] */
  const ab_tensor* d_w_out;    /* [E, F, D]; the dtype of x or float32 */
  const ab_tensor* d_b_out;    /* [E, D] */
  const ab_tensor* d_weights;  /* float32 [T, K] with slot_of_row (0 for a slot without a row), else [R] */
  const ab_tensor* weighted_a; /* [R, F]: w a, needed for d_w_out; zero in padding rows */
  /* as in the forward pass */
  float activation_alpha;
  float activation_limit;
  int32_t precision;  /* ab_precision */
  int32_t fp8_scales; /* ab_fp8_scales */
  /* quantised inputs: each tensor with its scales, or NULL */
  const ab_tensor* w_in_q;       /* [E, D, P, F] e4m3 */
  const ab_tensor* w_in_scales;  /* [E, D/128, P, F/128] float32 */
  const ab_tensor* w_out_q;      /* [E, F, D] e4m3 */
  const ab_tensor* w_out_scales; /* [E, F/128, D/128] float32 */
  /* outputs, or both NULL */
  const ab_tensor* dh_q;      /* [R, P, F] e4m3; zero in padding rows */
  const ab_tensor* dh_scales; /* [R, P, F/128] float32; 1 in padding rows */
  /* quantised inputs, or both NULL; used for da', so only allowed with h */
  const ab_tensor* d_out_q;      /* e4m3, the shape of d_out */
  const ab_tensor* d_out_scales; /* [T, D/128] with slot_of_row, else [R, D/128], float32 */
  /* adapters: each a pair, or both NULL */
  float lora_scale_in; /* finite */
  float lora_scale_out;
  const ab_tensor* lora_a_in;  /* [E or 1, D, r] */
  const ab_tensor* lora_b_in;  /* [E or 1, r, P, F] */
  const ab_tensor* lora_a_out; /* [E or 1, F, q] */
  const ab_tensor* lora_b_out; /* [E or 1, q, D] */
  const ab_tensor* lora_u;     /* [R, r] from the forward pass, or NULL: computed again if d_lora_b_in needs it */
  /* outputs with h, inputs without, or NULL; zero in padding rows */
  const ab_tensor* lora_v_in;  /* [R, r] */
  const ab_tensor* lora_v_out; /* [R, q] */
  /* outputs; each may be NULL: not requested */
  const ab_tensor* d_lora_a_in;
  const ab_tensor* d_lora_b_in;
  const ab_tensor* d_lora_a_out;
  const ab_tensor* d_lora_b_out;
  /* scales of packed weights, or NULL; such weights have no gradient */
  const ab_tensor* w_in_block_scales;  /* [E, D/32, P, F], or [E, D/128, P, F/128], in the order of w_in */
  const ab_tensor* w_out_block_scales; /* [E, F/32, D], or [E, F/128, D/128], in the order of w_out */
  /* As in the forward pass, for d_out. */
  ab_exchange* arriving;
  int32_t arriving_buffer;
  int32_t arriving_reserved;
} ab_expert_ffn_backward_args;

AB_API ab_status ab_expert_ffn_backward(const ab_expert_ffn_backward_args* args, const ab_exec* exec);
AB_API ab_status ab_expert_ffn_backward_workspace(const ab_expert_ffn_backward_args* args, const ab_exec* exec,
                                                  size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_EXPERTS_H_ */
