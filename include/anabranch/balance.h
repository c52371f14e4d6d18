/* Load balance: the auxiliary loss, from [E]-sized statistics or from dense scores.
 *
 *     loss = coeff * E / (K * N^2) * sum_e score_sum[e] * tokens_per_expert[e]        (Switch Transformer, eq. 4)
 *
 * N is the number of unmasked tokens in the whole batch. With [B, E] statistics the formula is applied to each
 * sequence, with N the tokens of that sequence, and the loss is the mean over B. N = 0 gives a zero loss and zero
 * gradients. tokens_per_expert may be uint8, int16, int32, int64, float16, bfloat16 or float32 (the "count dtypes"). */
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
  const ab_tensor* tokens_per_expert; /* [E] or [B, E], any count dtype */
  const ab_tensor* num_tokens;        /* [] or [B] int32 or int64: N, in device memory */
  const ab_tensor* loss;              /* [] float32, or NULL */
  const ab_tensor* d_score_sum;       /* like score_sum, or NULL: gradient of the loss with respect to score_sum */
} ab_load_balance_loss_args;

AB_API ab_status ab_load_balance_loss(const ab_load_balance_loss_args* args, const ab_exec* exec);

/* The loss of dense scores and its gradient. C may be a multiple of E: then the columns are B sequences side by
 * side, C = B E, and scores are multiplied by counts column by column. A call that requests only the gradient needs
 * no scores. */
typedef struct ab_moe_aux_loss_args {
  size_t size;
  int32_t topk;
  int32_t num_experts; /* E, a divisor of the number of columns C; 0: C */
  float coeff;
  const ab_tensor* probs;             /* [T, C] float32, bfloat16 or float16; may be NULL only if loss is NULL */
  const ab_tensor* tokens_per_expert; /* [C], any count dtype */
  const ab_tensor* num_tokens;        /* [] int32 or int64: N, in device memory; NULL: T */
  const ab_tensor* d_loss;            /* [] float32, bfloat16 or float16: cotangent of the loss; NULL: 1 */
  const ab_tensor* loss;              /* [] float32, or NULL */
  const ab_tensor* d_probs;           /* [T, C] float32, bfloat16 or float16: gradient with respect to probs, or NULL */
} ab_moe_aux_loss_args;

AB_API ab_status ab_moe_aux_loss(const ab_moe_aux_loss_args* args, const ab_exec* exec);
AB_API ab_status ab_moe_aux_loss_workspace(const ab_moe_aux_loss_args* args, const ab_exec* exec, size_t* bytes);

/* Column sums of dense scores. The order of the additions is fixed: it does not depend on the number of threads. */
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
