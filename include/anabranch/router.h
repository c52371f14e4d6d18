/* The router: selects experts and computes their weights from logits, and computes the gradient.
 *
 * Sizes: T tokens, E experts, K = topk experts per token, B sequences (T % B == 0; sequence b consists of tokens
 * b*T/B, ...). */
#ifndef ANABRANCH_ROUTER_H_
#define ANABRANCH_ROUTER_H_

#include "anabranch/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ab_score_function {
  AB_SOFTMAX = 0,     /* exp(z - logsumexp z) */
  AB_SIGMOID = 1,     /* 1 / (1 + exp(-z)) */
  AB_SQRTSOFTPLUS = 2 /* sqrt(log(1 + exp(z))) */
} ab_score_function;

/* One pass over the logits computes all requested outputs. An option that affects no requested output is an error. */
typedef struct ab_router_forward_args {
  size_t size;
  int32_t topk;           /* 1 <= K <= E */
  int32_t score_function; /* ab_score_function */
  int32_t normalize;      /* 1: weights of a token sum to scaling_factor; 0: raw scores */
  int32_t num_groups;     /* 0: no groups; else E % num_groups == 0 */
  int32_t group_topk;     /* groups selected per token; K % group_topk == 0, unless group_score_topk is given */
  float scaling_factor;   /* finite; multiplies the weights */
  /* inputs */
  const ab_tensor* logits;         /* [T, E] float32, bfloat16 or float16 */
  const ab_tensor* expert_bias;    /* [E] float, or NULL; affects the selection only */
  const ab_tensor* token_mask;     /* [T] bool, or NULL; 0 = padding: expert -1, weight 0, not counted */
  const ab_tensor* forced_experts; /* [T, K] int32, or NULL: the given selection (replay); -1 or out of range: no
                                    * expert; excludes expert_bias, groups and dense outputs */
  /* compact outputs */
  const ab_tensor* weights;           /* [T, K] float32 */
  const ab_tensor* experts;           /* [T, K] int32 */
  const ab_tensor* tokens_per_expert; /* [E] or [B, E] int32 */
  const ab_tensor* score_sum;         /* [E] or [B, E] float32: sum over tokens of the auxiliary scores */
  const ab_tensor* lse;               /* [T] float32: logsumexp of the logits */
  /* dense outputs */
  const ab_tensor* probs;       /* [T, E], dtype of the logits */
  const ab_tensor* routing_map; /* [T, E] bool, or [T, ceil(E/8)] uint8 bit map, or [T, K] int16 / int32 / int64 */
  const ab_tensor* aux_scores;  /* [T, E] float32 */
  /* more options */
  int32_t group_score_topk; /* the score of a group is the sum of its group_score_topk largest biased scores; 1 <=
                             * group_score_topk <= E / num_groups, and K <= group_topk E / num_groups. 0: the sum of
                             * its K / group_topk largest biased scores, or of that many logits with normalize,
                             * softmax and no bias */
  /* quantile balancing: requires expert_bias and E > K, excludes groups; both tensors or neither */
  const ab_tensor* qb_bin_bounds; /* [2] float32: lower < upper, in device memory */
  const ab_tensor* qb_histogram;  /* [E, bins] int32, output, at most 2^20 bins: for each expert, the histogram over
                                   * the unmasked tokens of (threshold - score of the expert), in equal bins from
                                   * lower to upper; values outside count in the first or last bin. threshold: the
                                   * (K+1)-th largest biased score of the token */
} ab_router_forward_args;

AB_API ab_status ab_router_forward(const ab_router_forward_args* args, const ab_exec* exec);
AB_API ab_status ab_router_forward_workspace(const ab_router_forward_args* args, const ab_exec* exec, size_t* bytes);

/* d_logits from the cotangents of weights (or probs), score_sum (or aux_scores) and lse, written once. */
typedef struct ab_router_backward_args {
  size_t size;
  int32_t topk;
  int32_t score_function;
  int32_t normalize;
  float scaling_factor;
  /* inputs and results of the forward pass */
  const ab_tensor* logits;     /* [T, E] */
  const ab_tensor* experts;    /* [T, K] int16, int32 or int64, out of range: no expert; NULL without d_weights and
                                * d_probs, or if routing_map is given */
  const ab_tensor* token_mask; /* [T] bool, or NULL */
  const ab_tensor* lse;        /* [T] float32 from the forward pass, used with a softmax or d_lse; NULL: recomputed */
  /* cotangents, each float32, bfloat16 or float16; NULL: zero */
  const ab_tensor* d_weights;    /* [T, K] */
  const ab_tensor* d_probs;      /* [T, E], read only at the selected experts; excludes d_weights */
  const ab_tensor* d_score_sum;  /* [E] or [B, E] */
  const ab_tensor* d_aux_scores; /* [T, E]; excludes d_score_sum */
  const ab_tensor* d_lse;        /* [T] */
  /* output */
  const ab_tensor* d_logits; /* [T, E], dtype of the logits; beside float32 logits any float dtype, rounded once */
  /* another result of the forward pass */
  const ab_tensor* routing_map; /* [T, E] bool, or [T, ceil(E/8)] uint8 bit map, with d_probs and instead of experts;
                                 * the map of a token is not read past its first K experts */
} ab_router_backward_args;

AB_API ab_status ab_router_backward(const ab_router_backward_args* args, const ab_exec* exec);
AB_API ab_status ab_router_backward_workspace(const ab_router_backward_args* args, const ab_exec* exec, size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif /* ANABRANCH_ROUTER_H_ */
