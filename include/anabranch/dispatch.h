/* Plan, dispatch and combine: group the rows of all tokens by expert, and sum them back per token.
 *
 * Sizes: T tokens, K experts per token (top-k), E experts, D width, R rows.
 *
 * A slot is an assignment (t, k): slot t*K + k is the k-th expert of token t. A row is one row of the dispatched
 * buffer. Two index arrays map one to the other: row_of_slot [T, K] (-1: the slot has no row) and slot_of_row [R]
 * (-1: the row is padding). No content of these arrays causes an access outside a buffer: an index out of range
 * counts as -1, and a row belongs to a slot only if both arrays agree. T*K < 2^31 and R < 2^31. */
#ifndef ANABRANCH_DISPATCH_H_
#define ANABRANCH_DISPATCH_H_

#include "anabranch/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Computes the layout of the rows: experts in order; within an expert rows are ordered by (token, slot); the group
 * of each expert is rounded up to a multiple of align_size. R is the size of slot_of_row. Groups are clipped to R
 * rows, and slots past it are dropped. */
typedef struct ab_plan_args {
  size_t size;
  int32_t num_experts; /* E >= 1 */
  int32_t align_size;  /* a >= 0; 0 and 1: no padding; R % a == 0 */
  /* P; 0 and 1: one buffer. Else the buffer consists of P regions of R/P rows, one per destination, and each
   * destination owns E/P consecutive experts. The groups of a destination start at the first row of its region and
   * are clipped to the region; slots past it are dropped. */
  int32_t num_destinations;
  /* exactly one of these two inputs */
  const ab_tensor* experts;     /* [T, K] int16, int32 or int64; -1: no expert; values outside [-1, E) count as -1 and
                                 * are added to dropped */
  const ab_tensor* routing_map; /* [T, E] bool, or [T, ceil(E/8)] uint8 bit map; every true entry is a slot: K = E */
  /* outputs; only slot_of_row is required */
  const ab_tensor* tokens_per_expert; /* [E] int32, before any dropping */
  const ab_tensor* group_sizes;       /* [E] int32, aligned and clipped */
  const ab_tensor* offsets;           /* [E+1] int32: the first row of every group, then the end of the last group */
  const ab_tensor* row_of_slot;       /* [T, K] int32 */
  const ab_tensor* slot_of_row;       /* [R] int32 */
  const ab_tensor* dropped;           /* [] int32, or [n] with n >= 1: elements after the first are set to 0 */
  const ab_tensor* row_id_map;        /* [T, 2E+1] int32, only with routing_map: see ab_expand_row_id_map */
  /* is_part 1: the plan is for experts first_expert to first_expert + num_experts - 1 of a larger set. Other values in
   * `experts` count as -1 and are not added to dropped. is_part 0: first_expert must be 0. */
  int32_t is_part;
  int32_t first_expert;
} ab_plan_args;

AB_API ab_status ab_plan(const ab_plan_args* args, const ab_exec* exec);
AB_API ab_status ab_plan_workspace(const ab_plan_args* args, const ab_exec* exec, size_t* bytes);

/* rows[row_of_slot[t, k]] = x[t], or weights[t, k] * x[t]; all other rows are zero. */
typedef struct ab_dispatch_args {
  size_t size;
  const ab_tensor* x;           /* [T, D]; any dtype without weights, a float dtype with weights */
  const ab_tensor* row_of_slot; /* [T, K] int32 */
  const ab_tensor* slot_of_row; /* [R] int32 */
  const ab_tensor* weights;     /* [T, K] float, or NULL */
  const ab_tensor* rows;        /* [R, D], the dtype of x, or another float dtype if x is a float */
} ab_dispatch_args;

AB_API ab_status ab_dispatch(const ab_dispatch_args* args, const ab_exec* exec);

/* out[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]], plus addend[t]. Sums are float32: first the slots
 * in ascending order, skipping those without a row, then the addend. The result is rounded once, to the dtype of
 * out. Without weights this is also the gradient of dispatch with respect to x. out may be the addend itself, with
 * the same address and dtype; otherwise the two must not overlap. */
typedef struct ab_combine_args {
  size_t size;
  const ab_tensor* rows;        /* [R, D] float */
  const ab_tensor* row_of_slot; /* [T, K] int32 */
  const ab_tensor* weights;     /* [T, K] float, or NULL: ones */
  const ab_tensor* out;         /* [T, D] float */
  const ab_tensor* addend;      /* [T, D] float, or NULL: zeros */
} ab_combine_args;

AB_API ab_status ab_combine(const ab_combine_args* args, const ab_exec* exec);
AB_API ab_status ab_combine_workspace(const ab_combine_args* args, const ab_exec* exec, size_t* bytes);

/* d_rows[row] = weights[t, k] * d_out[t], zero in rows without a slot;
 * d_weights[t, k] = <d_out[t], rows[row]>, zero in slots without a row. */
typedef struct ab_combine_backward_args {
  size_t size;
  const ab_tensor* d_out;       /* [T, D] float */
  const ab_tensor* rows;        /* [R, D] float; needed only for d_weights */
  const ab_tensor* row_of_slot; /* [T, K] int32 */
  const ab_tensor* slot_of_row; /* [R] int32 */
  const ab_tensor* weights;     /* [T, K] float, or NULL: ones */
  const ab_tensor* d_rows;      /* [R, D] float, or NULL */
  const ab_tensor* d_weights;   /* [T, K] float, or NULL */
} ab_combine_backward_args;

AB_API ab_status ab_combine_backward(const ab_combine_backward_args* args, const ab_exec* exec);

/* Chunk i of the output is chunk sorted_indices[i] of x; rows past the sum of the sizes keep their place. inverse =
 * 1 applies the inverse permutation, which is also the gradient. The result is always a permutation of the rows: a
 * negative size counts as 0, sizes are clipped to R, an index that is out of range or repeated is skipped, and
 * chunks that no index names follow in their original order. */
typedef struct ab_sort_chunks_args {
  size_t size;
  int32_t inverse;                 /* 0 or 1 */
  const ab_tensor* x;              /* [R, D], any dtype */
  const ab_tensor* split_sizes;    /* [S] int32 */
  const ab_tensor* sorted_indices; /* [S] int32 */
  const ab_tensor* out;            /* [R, D], dtype of x */
  const ab_tensor* row_id_map;     /* [R] int32, or NULL: the position on the sorted side of row r of the unsorted
                                    * side */
} ab_sort_chunks_args;

AB_API ab_status ab_sort_chunks(const ab_sort_chunks_args* args, const ab_exec* exec);
AB_API ab_status ab_sort_chunks_workspace(const ab_sort_chunks_args* args, const ab_exec* exec, size_t* bytes);

/* Computes the two index arrays, with K = E, from TransformerEngine's row_id_map. In its row t, the first columns
 * hold the n rows of the token in descending order, as if there were no padding; the columns from E on hold their
 * experts; the last column holds n. Entries that ab_plan does not define are -1. pad_offsets[e] is the number of
 * padding rows before expert e. */
typedef struct ab_expand_row_id_map_args {
  size_t size;
  const ab_tensor* row_id_map;  /* [T, 2E+1] int32 */
  const ab_tensor* pad_offsets; /* [E] int32, or NULL: zeros */
  const ab_tensor* row_of_slot; /* [T, E] int32 */
  const ab_tensor* slot_of_row; /* [R] int32; if several slots name one row, the last one */
} ab_expand_row_id_map_args;

AB_API ab_status ab_expand_row_id_map(const ab_expand_row_id_map_args* args, const ab_exec* exec);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_DISPATCH_H_ */
