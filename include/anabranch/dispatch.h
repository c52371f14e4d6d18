/* Plan, dispatch, combine: from the experts of every token to rows that stand together by expert, and back.
 * Sizes: T tokens, K slots a token, E experts, D width, R rows.
 *
 * Slot t*K + k is the k-th expert of token t; a row is one line of the dispatched buffer. Two maps tie them together:
 * row_of_slot [T, K] (-1: the slot has no row) and slot_of_row [R] (-1: the row is padding). Whatever the maps hold,
 * nothing outside a buffer is read or written: an index out of range counts as -1, and a row belongs to a slot where
 * both maps say so. T*K < 2^31 and R < 2^31. */
#ifndef ANABRANCH_DISPATCH_H_
#define ANABRANCH_DISPATCH_H_

#include "anabranch/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Lays out the rows: experts in order, within an expert by (token, slot), each expert's group rounded up to a multiple
 * of align_size. R is the size of slot_of_row; groups are clipped to it and the slots past it dropped. */
typedef struct ab_plan_args {
  size_t size;
  int32_t num_experts; /* E >= 1 */
  int32_t align_size;  /* a >= 0, 0 and 1: no padding; R % a == 0 */
  /* P, 0 and 1: one buffer. Else rows are P regions of R/P, a region a destination that owns E/P neighbouring experts:
   * its groups start at its first row, are clipped to it, and slots past it are dropped. */
  int32_t num_destinations;
  /* one of the two inputs */
  const ab_tensor* experts;     /* [T, K] int32; -1: no expert; outside [-1, E): as -1, and counted in dropped */
  const ab_tensor* routing_map; /* [T, E] bool, or [T, ceil(E/8)] uint8 bit map; every true entry is a slot: K = E */
  /* outputs; only slot_of_row must be there */
  const ab_tensor* tokens_per_expert; /* [E] int32, before any dropping */
  const ab_tensor* group_sizes;       /* [E] int32, aligned and clipped */
  const ab_tensor* offsets;           /* [E+1] int32: first row of every group; the end of the last */
  const ab_tensor* row_of_slot;       /* [T, K] int32 */
  const ab_tensor* slot_of_row;       /* [R] int32 */
  const ab_tensor* dropped;           /* [] int32 */
  const ab_tensor* row_id_map;        /* [T, 2E+1] int32, with routing_map only: see ab_expand_row_id_map */
} ab_plan_args;

AB_API ab_status ab_plan(const ab_plan_args* args, const ab_exec* exec);
AB_API ab_status ab_plan_workspace(const ab_plan_args* args, const ab_exec* exec, size_t* bytes);

/* rows[row_of_slot[t, k]] = x[t], or weights[t, k] * x[t]; other rows are zero. */
typedef struct ab_dispatch_args {
  size_t size;
  const ab_tensor* x;           /* [T, D]; without weights of any dtype, with weights a float */
  const ab_tensor* row_of_slot; /* [T, K] int32 */
  const ab_tensor* slot_of_row; /* [R] int32 */
  const ab_tensor* weights;     /* [T, K] float, or NULL */
  const ab_tensor* rows;        /* [R, D], the dtype of x, or another float where x is a float */
} ab_dispatch_args;

AB_API ab_status ab_dispatch(const ab_dispatch_args* args, const ab_exec* exec);

/* out[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]], plus addend[t]. Everything is added in float32: the
 * slots in ascending order, those without a row skipped, then the addend; the result is rounded once, to the dtype of
 * out. Without weights this is also the gradient of dispatch in x. out may be the addend itself, of the same address
 * and dtype; otherwise the two may not overlap. */
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
  const ab_tensor* rows;        /* [R, D] float; needed for d_weights only */
  const ab_tensor* row_of_slot; /* [T, K] int32 */
  const ab_tensor* slot_of_row; /* [R] int32 */
  const ab_tensor* weights;     /* [T, K] float, or NULL: ones */
  const ab_tensor* d_rows;      /* [R, D] float, or NULL */
  const ab_tensor* d_weights;   /* [T, K] float, or NULL */
} ab_combine_backward_args;

AB_API ab_status ab_combine_backward(const ab_combine_backward_args* args, const ab_exec* exec);

/* Chunk i of the output is chunk sorted_indices[i] of x; rows past the sum of the sizes stay. With inverse = 1 the way
 * back, which is the gradient. The rows are always permuted: a negative size counts as 0, sizes are clipped to R, an
 * index out of range or repeated is skipped, and chunks that are not named follow in their order. */
typedef struct ab_sort_chunks_args {
  size_t size;
  int32_t inverse;                 /* 0 or 1 */
  const ab_tensor* x;              /* [R, D] of any dtype */
  const ab_tensor* split_sizes;    /* [S] int32 */
  const ab_tensor* sorted_indices; /* [S] int32 */
  const ab_tensor* out;            /* [R, D], dtype of x */
  const ab_tensor* row_id_map;     /* [R] int32, or NULL: where row r of the unsorted side stands on the sorted side */
} ab_sort_chunks_args;

AB_API ab_status ab_sort_chunks(const ab_sort_chunks_args* args, const ab_exec* exec);
AB_API ab_status ab_sort_chunks_workspace(const ab_sort_chunks_args* args, const ab_exec* exec, size_t* bytes);

/* The two maps, with K = E, from TransformerEngine's row_id_map: row t holds the token's n rows in descending order, as
 * if there were no padding, from column E on their experts, and n in the last column; what ab_plan has nothing to write
 * to is -1. pad_offsets[e] is the padding before expert e. */
typedef struct ab_expand_row_id_map_args {
  size_t size;
  const ab_tensor* row_id_map;  /* [T, 2E+1] int32 */
  const ab_tensor* pad_offsets; /* [E] int32, or NULL: zeros */
  const ab_tensor* row_of_slot; /* [T, E] int32 */
  const ab_tensor* slot_of_row; /* [R] int32; where several slots name one row, the last */
} ab_expand_row_id_map_args;

AB_API ab_status ab_expand_row_id_map(const ab_expand_row_id_map_args* args, const ab_exec* exec);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_DISPATCH_H_ */
