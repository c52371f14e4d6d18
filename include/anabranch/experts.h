/* The experts: grouped matrix products and the gated feed-forward network, forward and backward.
 * Sizes: T tokens, E experts, K = topk experts a token, D model width, F expert width, R rows, P parts of W_in:
 * 2 (gate, up) for a gated expert, 1 for an ungated one.
 *
 * Rows of one expert stand together, group_sizes[e] rows each, in memory of the device. Negative sizes count as 0 and
 * sizes past R are cut, so that no content of group_sizes touches memory out of bounds. Rows past their sum are zero
 * in every output, unless skip_rest says that nobody reads them, and give no gradient.
 *
 * Floating-point tensors named x, w, y, h and their gradients have one dtype: float32, bfloat16 or float16; cotangents
 * (d_y, d_out) and weights of rows may have any of the three. Products accumulate in float32. bfloat16 runs on
 * bfloat16 instructions where the CPU has them (AVX-512-BF16 or AMX) and is converted to float32 tile by tile
 * elsewhere; the environment variable ANABRANCH_BF16 = native | convert overrides that choice, and is an error
 * (AB_UNSUPPORTED) of every call with bfloat16 products where it asks for what is not there. The bfloat16 instructions
 * treat denormal operands and results as 0; "convert" keeps denormals.
 *
 * The weights of the feed-forward network may lie in memory in other orders than row-major, which strides tell: W_in
 * [E, D, P, F] as (E, D, P, F), (E, P, F, D), the way of PyTorch's Linear, (E, D, F, P), gate and up interleaved, or
 * (E, F, P, D), both; W_out [E, F, D] as that or as (E, D, F). Gradients lie as their weights do. With interleaved gate
 * and up, b_in, h, dh and d_b_in have F before P in memory too. Nothing is copied or transposed. */
#ifndef ANABRANCH_EXPERTS_H_
#define ANABRANCH_EXPERTS_H_

#include "anabranch/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* act(h) of a hidden column; gated, the gate's, times that of up. The last four are of two inputs, gate g and up u, and
 * for gated experts alone: g' = min(g, limit), u' = clamp(u, -limit, limit), whose slopes are 1 up to the limit and at
 * it. Their parameters are activation_alpha and activation_limit, finite and above 0, and 0 where they have none. */
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

/* How the float32 operands of a product are multiplied; bfloat16 and float16 are always multiplied as they are. Sums
 * are float32 with either. */
typedef enum ab_precision {
  /* As float32. On tensor cores as sums of products of parts of the operands, with an error at float32's level. */
  AB_PRECISION_HIGHEST = 0,
  /* A GPU may round operands to TF32, which has 10 binary digits behind the first: each to within 2^-10 of its size. A
   * CPU, and a kernel without such instructions, multiplies as with HIGHEST, which is at least as exact. */
  AB_PRECISION_TF32 = 1,
  /* Both factors of y = x w and the like are quantised, see below, whatever their dtype. Gradients of weights are
   * products of what is not quantised, float32 operands as with HIGHEST. Widths (D, F, N) are multiples of 128. */
  AB_PRECISION_FP8 = 2
} ab_precision;

/* How a block's scale is made of its largest number, in an operation with AB_PRECISION_FP8; 0 in others. */
typedef enum ab_fp8_scales {
  AB_FP8_SCALES_FLOAT32 = 0,
  AB_FP8_SCALES_POWER_OF_TWO = 1 /* rounded up to a power of two */
} ab_fp8_scales;

/* Quantised numbers: a tensor q of AB_FLOAT8_E4M3 and one of float32 scales, one for every block; a block is 128
 * consecutive elements of one row of x, or 128 x 128 of the matrix of one expert, in W_in [E, D, P, F] of one part. The
 * number is q * scale. To the bit, on every backend, in float32 with denormals, each operation rounded to nearest even:
 *
 *     m = max |v| over the block;
 *     scale = max(m / 448, 2^-126), or 1 where m = 0; POWER_OF_TWO: the smallest power of two not below that;
 *     q = v / scale, a division, rounded to nearest even once more, to e4m3; it is never above 448. -0 stays -0.
 *
 * A block with a NaN or an infinity has the scale NaN (0x7fc00000) and NaN (0x7f) in every q: so a row's block makes
 * that row's results NaN, and a weight's block those of all rows in its columns.
 *
 * Factors of a product stand with the dimension that is summed over next to next (w_q): FP8 tensor cores take no
 * others. Scales lie as their weights do, in either case. What is not given quantised is quantised in the workspace. */

/* q and scales of rows. */
typedef struct ab_quantize_rows_args {
  size_t size;
  int32_t fp8_scales;      /* ab_fp8_scales */
  const ab_tensor* x;      /* [R, D] float, D a multiple of 128 */
  const ab_tensor* q;      /* [R, D] e4m3 */
  const ab_tensor* scales; /* [R, D/128] float32 */
} ab_quantize_rows_args;

AB_API ab_status ab_quantize_rows(const ab_quantize_rows_args* args, const ab_exec* exec);
AB_API ab_status ab_quantize_rows_workspace(const ab_quantize_rows_args* args, const ab_exec* exec, size_t* bytes);

/* q and scales of weights, as they are and transposed, one of both at least. w may lie in memory as the network's
 * weights may, [E, D, N] as W_out; what comes out is row-major. */
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

/* y = x w[e] on the rows of expert e; with transpose_w, y = x w[e]^T. With AB_PRECISION_FP8 w may have any float dtype,
 * and x may be quantised; then y may have any, too. */
typedef struct ab_grouped_matmul_args {
  size_t size;
  int32_t transpose_w;
  const ab_tensor* x;           /* [R, D]; e4m3 together with x_scales */
  const ab_tensor* w;           /* [E, D, N]; with transpose_w [E, N, D]; may be NULL with w_q, which is read instead */
  const ab_tensor* group_sizes; /* [E] int32 */
  const ab_tensor* y;           /* [R, N] */
  int32_t precision;            /* ab_precision */
  int32_t fp8_scales;           /* ab_fp8_scales */
  const ab_tensor* x_scales;    /* [R, D/128] float32, or NULL */
  const ab_tensor* w_q;         /* [E, N, D] e4m3 together with w_scales, or NULL */
  const ab_tensor* w_scales;    /* [E, D/128, N/128] float32; with transpose_w [E, N/128, D/128] */
} ab_grouped_matmul_args;

AB_API ab_status ab_grouped_matmul(const ab_grouped_matmul_args* args, const ab_exec* exec);
AB_API ab_status ab_grouped_matmul_workspace(const ab_grouped_matmul_args* args, const ab_exec* exec, size_t* bytes);

/* dw[e] = x^T d_y over the rows of expert e, summed in float32; zero for an expert without rows. Both operands may have
 * any float dtype. For weights stored transposed, swap x and d_y. */
typedef struct ab_grouped_matmul_dw_args {
  size_t size;
  int32_t accumulate;           /* 1: adds to what stands in d_w, which is float32 then */
  const ab_tensor* x;           /* [R, D] */
  const ab_tensor* d_y;         /* [R, N] */
  const ab_tensor* group_sizes; /* [E] int32 */
  const ab_tensor* d_w;         /* [E, D, N], any float dtype */
  int32_t precision;            /* ab_precision, but not FP8 */
  int32_t reserved;             /* 0; a later option may take its place */
} ab_grouped_matmul_dw_args;

AB_API ab_status ab_grouped_matmul_dw(const ab_grouped_matmul_dw_args* args, const ab_exec* exec);
AB_API ab_status ab_grouped_matmul_dw_workspace(const ab_grouped_matmul_dw_args* args, const ab_exec* exec,
                                                size_t* bytes);

/* A grouped product whose rows are summed by token, without a buffer of all rows on a GPU. On the rows of expert e
 *
 *     rows = x w[e] + bias[e], or with transpose_w x w[e]^T + bias[e], rounded to the dtype of x, or if that is e4m3
 *            to the dtype of out;
 *     out[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]], plus addend[t]:
 *
 * to the bit what ab_expert_ffn_forward makes of `a`, or ab_expert_ffn_backward of dh, and ab_combine of their rows.
 * With weight_early x has the weights already: the row's weight, that of its slot_of_row, multiplies the bias, and the
 * sum applies none. Rows whose slot_of_row lies outside [0, T K) are padding and count as zeros, whatever x and w hold;
 * so do rows past the groups. With skip_rest the caller knows that row_of_slot names neither, as in a plan's own maps,
 * and no zeros are written for them; where it does, out has any value there.
 * Sums are float32, slots in ascending order, then the addend, and are rounded once, to the dtype of out. out may be
 * the addend itself, of the same address and dtype; otherwise the two may not overlap. Workspace: [R, N] of the dtype
 * of rows, and some MiB a thread; on a GPU as many columns of it as fit where gradients of weights will stand: a
 * network's backward pass has room for one of the size of w, its forward pass for both.
 * With AB_PRECISION_FP8 x may be what ab_expert_ffn_forward quantised, a with a_scales, or ab_expert_ffn_backward, dh_q
 * with dh_scales, the latter seen as [R, P F]. Those have P before F, as w_q must then; blocks never mix gate and up.
 */
typedef struct ab_grouped_matmul_combine_args {
  size_t size;
  int32_t transpose_w;
  int32_t weight_early;         /* 1: together with weights */
  int32_t skip_rest;            /* 1: row_of_slot names rows of slots only; see above */
  const ab_tensor* x;           /* [R, D]; e4m3 together with x_scales */
  const ab_tensor* w;           /* [E, D, N]; with transpose_w [E, N, D]; may be NULL with w_q, which is read instead */
  const ab_tensor* group_sizes; /* [E] int32 */
  const ab_tensor* bias;        /* [E, N] of the dtype of rows, or NULL */
  const ab_tensor* slot_of_row; /* [R] int32 */
  const ab_tensor* row_of_slot; /* [T, K] int32 */
  const ab_tensor* weights;     /* [T, K] float, or NULL: ones */
  const ab_tensor* addend;      /* [T, N] float, or NULL: zeros */
  const ab_tensor* out;         /* [T, N] float */
  int32_t backward;             /* 1: rows are gradients; for the size of the workspace alone, see above */
  int32_t precision;            /* ab_precision */
  int32_t fp8_scales;           /* ab_fp8_scales */
  const ab_tensor* x_scales;    /* [R, D/128] float32, or NULL */
  const ab_tensor* w_q;         /* [E, N, D] e4m3 together with w_scales, or NULL */
  const ab_tensor* w_scales;    /* [E, D/128, N/128] float32; with transpose_w [E, N/128, D/128] */
} ab_grouped_matmul_combine_args;

AB_API ab_status ab_grouped_matmul_combine(const ab_grouped_matmul_combine_args* args, const ab_exec* exec);
AB_API ab_status ab_grouped_matmul_combine_workspace(const ab_grouped_matmul_combine_args* args, const ab_exec* exec,
                                                     size_t* bytes);

/* h = x W_in[e] + b_in[e];  a = phi(h_gate, h_up), or act(h) ungated;  y = a W_out[e] + b_out[e].
 *
 * With slot_of_row, x holds tokens: row r reads token slot_of_row[r] / K; a row whose entry lies outside [0, T K) is
 * padding, zero in y and h. Without it, x holds the rows themselves. Weights multiply y, or with weight_early a and
 * b_out. `a` is computed from h in float32 before h is rounded, and rounded to the dtype of x.
 *
 * Where y is NULL and a is given, this is the first half alone, for ab_grouped_matmul_combine: without w_out and b_out,
 * and with no other weights than early ones.
 * Workspace: without a, [R, F] of the dtype of x; and some MiB a thread.
 *
 * With AB_PRECISION_FP8 h = Q(x) Q(W_in), x being quantised before any row is gathered, and y = Q(a) Q(W_out), where
 * `a`, times an early weight, is quantised from float32. `a` itself comes rounded to the dtype of x or, with a_scales,
 * quantised. Quantised weights have P before F whatever order w_in has; w_in and w_out may be NULL where these are
 * given, which are read instead, and without w_in gate and up stand side by side in b_in and h. w_in and w_out may have
 * any float dtype, forward and backward. x may be NULL where x_q is given, which is read instead; its dtype is then
 * that of y, h, b_in and an `a` that is not quantised. */
typedef struct ab_expert_ffn_forward_args {
  size_t size;
  int32_t activation;   /* ab_activation */
  int32_t weight_early; /* 1: weights multiply before W_out */
  int32_t topk;         /* K with slot_of_row, else 0 */
  int32_t skip_rest;    /* 1: rows past the groups may have any value in h and a */
  /* inputs */
  const ab_tensor* x;           /* [T, D] with slot_of_row, else [R, D] */
  const ab_tensor* slot_of_row; /* [R] int32, or NULL */
  const ab_tensor* group_sizes; /* [E] int32 */
  const ab_tensor* w_in;        /* [E, D, P, F] */
  const ab_tensor* b_in;        /* [E, P, F], or NULL */
  const ab_tensor* w_out;       /* [E, F, D]; NULL without y */
  const ab_tensor* b_out;       /* [E, D], or NULL */
  const ab_tensor* weights;     /* float [T, K] with slot_of_row, else [R]; NULL: 1 */
  /* outputs */
  const ab_tensor* y; /* [R, D]; may be NULL where a is given */
  const ab_tensor* h; /* [R, P, F], or NULL: kept for the backward pass */
  const ab_tensor* a; /* [R, F], or NULL; zero in padding */
  /* of activations that have them, see ab_activation */
  float activation_alpha;
  float activation_limit;
  int32_t precision;  /* ab_precision */
  int32_t fp8_scales; /* ab_fp8_scales */
  /* quantised inputs: each of the two with its scales, or NULL */
  const ab_tensor* w_in_q;       /* [E, P, F, D] e4m3 */
  const ab_tensor* w_in_scales;  /* [E, D/128, P, F/128] float32 */
  const ab_tensor* w_out_q;      /* [E, D, F] e4m3; NULL without y */
  const ab_tensor* w_out_scales; /* [E, F/128, D/128] float32 */
  /* output */
  const ab_tensor* a_scales; /* [R, F/128] float32, and a is e4m3; or NULL. Padding: 1 */
  /* quantised inputs, or both NULL */
  const ab_tensor* x_q;      /* e4m3 of the shape of x */
  const ab_tensor* x_scales; /* [T, D/128] with slot_of_row, else [R, D/128], float32 */
} ab_expert_ffn_forward_args;

AB_API ab_status ab_expert_ffn_forward(const ab_expert_ffn_forward_args* args, const ab_exec* exec);
AB_API ab_status ab_expert_ffn_forward_workspace(const ab_expert_ffn_forward_args* args, const ab_exec* exec,
                                                 size_t* bytes);

/* With d_y = d_out of the row's token, unweighted, and w the row's weight (1 without weights):
 *
 *     da' = d_y W_out[e]^T;  d_w = <da', a> + <d_y, b_out[e]>;  da = w da';  dh = phi'(h) da;
 *     dW_out = (w a)^T d_y;  db_out = sum w d_y;  dW_in = x^T dh;  db_in = sum dh;  dx = dh W_in^T.
 *
 * The same for early and late weights. Memory: dh may be the very buffer of h, which it then takes over. The workspace
 * holds w a, [R, F] of the dtype of x, when d_w_out is wanted and weighted_a is not given; dh, [R, P, F], when
 * something needs it and it is not given; and some MiB a thread. So with dh in h's place the peak is weights,
 * gradients, x, h and two row buffers (w a and dx_rows), or without dx_rows, which ab_grouped_matmul_combine sums as it
 * computes them from dh, only w a.
 *
 * In several calls: the first gives dh, weighted_a and d_weights; those after it, without h, read dh or weighted_a and
 * give the rest. They ignore what stands in padding rows of dh and weighted_a, which must be finite. If d_w_out comes
 * first too, and d_w_in last, w a and what ab_grouped_matmul_combine holds between the two can stand in the memory of
 * d_w_in, if it is large enough and not accumulated into.
 *
 * d_w_in and d_w_out have the dtype of x or are float32, each for itself. To sum gradients over several batches, let
 * them be float32 and accumulate.
 *
 * With AB_PRECISION_FP8 da' = Q(d_out) Q(W_out)^T, d_out being quantised before any row is gathered, and
 * dx = Q(dh) Q(W_in)^T, where dh is quantised as it stands, rounded to its dtype; all else is as written. Quantised
 * weights, dh_q and dh_scales have P before F whatever order w_in has; w_in and w_out may be NULL where quantised ones
 * are given. A call without h reads dh_q and dh_scales for dx_rows, if they are given, else it quantises dh. Q(d_out)
 * is d_out_q, where that is given; d_out is there beside it, for all else. */
typedef struct ab_expert_ffn_backward_args {
  size_t size;
  int32_t activation;
  int32_t topk;       /* K with slot_of_row, else 0 */
  int32_t accumulate; /* 1: adds to what stands in d_w_in and d_w_out, one of them at least; float32 then */
  int32_t skip_rest;  /* 1: rows past the groups may have any value in dh and weighted_a */
  /* what the forward pass saw and kept */
  const ab_tensor* x;           /* [T, D] with slot_of_row, else [R, D] */
  const ab_tensor* slot_of_row; /* [R] int32, or NULL */
  const ab_tensor* group_sizes; /* [E] int32 */
  const ab_tensor* w_in;        /* [E, D, P, F] */
  const ab_tensor* w_out;       /* [E, F, D] */
  const ab_tensor* b_out;       /* [E, D], or NULL; enters d_weights only */
  const ab_tensor* weights;     /* float [T, K] with slot_of_row, else [R]; NULL: 1 */
  const ab_tensor* h;           /* [R, P, F]; NULL: dh or weighted_a, whichever is needed, is there already */
  /* cotangent */
  const ab_tensor* d_out; /* float [T, D] with slot_of_row, else [R, D]; NULL without h, d_w_out and d_b_out */
  /* outputs, each may be NULL: not wanted */
  const ab_tensor* dh;         /* [R, P, F]; its memory may be that of h */
  const ab_tensor* dx_rows;    /* [R, D] */
  const ab_tensor* d_w_in;     /* [E, D, P, F], or float32 */
  const ab_tensor* d_b_in;     /* [E, P, F] */
  const ab_tensor* d_w_out;    /* [E, F, D], or float32 */
  const ab_tensor* d_b_out;    /* [E, D] */
  const ab_tensor* d_weights;  /* float32 [T, K] with slot_of_row (0 for a slot without a row), else [R] */
  const ab_tensor* weighted_a; /* [R, F]: w a, which d_w_out needs; zero in padding */
  /* as in the forward pass */
  float activation_alpha;
  float activation_limit;
  int32_t precision;  /* ab_precision */
  int32_t fp8_scales; /* ab_fp8_scales */
  /* quantised inputs: each of the two with its scales, or NULL */
  const ab_tensor* w_in_q;       /* [E, D, P, F] e4m3 */
  const ab_tensor* w_in_scales;  /* [E, D/128, P, F/128] float32 */
  const ab_tensor* w_out_q;      /* [E, F, D] e4m3 */
  const ab_tensor* w_out_scales; /* [E, F/128, D/128] float32 */
  /* outputs, or both NULL */
  const ab_tensor* dh_q;      /* [R, P, F] e4m3; zero in padding */
  const ab_tensor* dh_scales; /* [R, P, F/128] float32; 1 in padding */
  /* quantised inputs, or both NULL; for da', so with h alone */
  const ab_tensor* d_out_q;      /* e4m3 of the shape of d_out */
  const ab_tensor* d_out_scales; /* [T, D/128] with slot_of_row, else [R, D/128], float32 */
} ab_expert_ffn_backward_args;

AB_API ab_status ab_expert_ffn_backward(const ab_expert_ffn_backward_args* args, const ab_exec* exec);
AB_API ab_status ab_expert_ffn_backward_workspace(const ab_expert_ffn_backward_args* args, const ab_exec* exec,
                                                  size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_EXPERTS_H_ */
