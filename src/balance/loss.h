// Checked arguments of the load-balancing losses, and their formulas.
#pragma once

#include <cstdint>

#include "anabranch/balance.h"
#include "balance/count.h"

namespace anabranch {

struct LoadBalanceLoss {
  int64_t B = 1;
  int64_t E = 0;
  double coeff_per_topk = 0.0;  // coeff * E / (K * B)
  const float* score_sum = nullptr;
  Counts tokens_per_expert;
  Counts num_tokens;  // NULL data: T
  int64_t T = 0;
  float* loss = nullptr;
  float* d_score_sum = nullptr;
};

// The loss of dense scores, which is the load-balancing loss of their column sums.
struct MoeAuxLoss {
  int64_t T = 0;
  int64_t C = 0;
  LoadBalanceLoss column_loss;  // the call has yet to set its sums and its loss
  const void* probs = nullptr;
  int32_t probs_dtype = 0;
  Counts d_loss;  // NULL data: 1
  float* loss = nullptr;
  void* d_probs = nullptr;
  int32_t d_probs_dtype = 0;
};

ab_status check_load_balance_loss(const ab_load_balance_loss_args* args, LoadBalanceLoss* op);
ab_status check_moe_aux_loss(const ab_moe_aux_loss_args* args, MoeAuxLoss* op);

void load_balance_loss(const LoadBalanceLoss& op);

namespace {

// d loss / d score_sum[b, e] = loss_factor(op, b) * tokens_per_expert[b, e]; 0 without tokens.
AB_INLINE double loss_factor(const LoadBalanceLoss& op, int64_t b) {
  const double N = op.num_tokens.data == nullptr ? static_cast<double>(op.T) : count_at(op.num_tokens, b);
  return N > 0 ? op.coeff_per_topk / (N * N) : 0.0;
}
AB_INLINE double loss_gradient(const LoadBalanceLoss& op, double factor, int64_t i) {
  return factor != 0.0 ? factor * count_at(op.tokens_per_expert, i) : 0.0;
}

}  // namespace
}  // namespace anabranch
