/* Load balance: the auxiliary loss on [E]-sized statistics and on dense scores.
 *
 *     loss = coeff * E / (K * N^2) * sum_e score_sum[e] * tokens_per_expert[e]        (Switch Transformer, eq. 4)
 *
 * N is the number of unmasked tokens of the whole batch. With [B, E] statistics the loss is the mean over B of the
 * formula with N the tokens of that sequence; N = 0 gives 0 and zero gradients. Counts of tokens per expert may be
 * uint8, int16, int32, int64, float16, bfloat16 or float32. */
#ifndef ANABRANCH_BALANCE_H_
#define ANABRANCH_BALANCE_H_

#include "anabranch/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ab_load_balance_loss_args {
  size_t size;
  int32_t topk;
  float coeff;
  const ab_tensor* score_sum;         /* [E] or [B, E] float32 */
  const ab_tensor* tokens_per_expert; /* [E] or [B, E], any of the dtypes of counts */
  const ab_tensor* num_tokens;        /* [] or [B] int32 or int64: N, in memory of the device */
  const ab_tensor* loss;              /* [] float32, or NULL */
  const ab_tensor* d_score_sum;       /* like score_sum, or NULL: the gradient of the loss in score_sum */
} ab_load_balance_loss_args;

AB_API ab_status ab_load_balance_loss(const ab_load_balance_loss_args* args, const ab_exec* exec);

/* The loss of dense scores and its gradient. Columns may be more than experts, a multiple: sequences side by side,
 * C = B E, whose scores and counts are multiplied column by column. A call for the gradient alone needs no scores. */
typedef struct ab_moe_aux_loss_args {
  size_t size;
  int32_t topk;
  int32_t num_experts; /* E, a divisor of the columns C; 0: C */
  float coeff;
  const ab_tensor* probs;             /* [T, C] float32, bfloat16 or float16; NULL only without loss */
  const ab_tensor* tokens_per_expert; /* [C], any of the dtypes of counts */
  const ab_tensor* num_tokens;        /* [] int32 or int64: N, in memory of the device; NULL: T */
  const ab_tensor* d_loss;            /* [] float32, bfloat16 or float16: the cotangent of the loss; NULL: 1 */
  const ab_tensor* loss;              /* [] float32, or NULL */
  const ab_tensor* d_probs;           /* [T, C] float32, bfloat16 or float16: the gradient in probs, or NULL */
} ab_moe_aux_loss_args;

AB_API ab_status ab_moe_aux_loss(const ab_moe_aux_loss_args* args, const ab_exec* exec);
AB_API ab_status ab_moe_aux_loss_workspace(const ab_moe_aux_loss_args* args, const ab_exec* exec, size_t* bytes);

/* Column sums of dense scores, in a fixed order that no thread count changes. */
typedef struct ab_score_sum_args {
  size_t size;
  const ab_tensor* scores;    /* [T, E] float32, bfloat16 or float16 */
  const ab_tensor* score_sum; /* [E] or [B, E] float32 */
} ab_score_sum_args;

AB_API ab_status ab_score_sum(const ab_score_sum_args* args, const ab_exec* exec);
AB_API ab_status ab_score_sum_workspace(const ab_score_sum_args* args, const ab_exec* exec, size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_BALANCE_H_ */
