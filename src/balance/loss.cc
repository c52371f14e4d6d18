// ab_load_balance_loss
#include "balance/loss.h"

#include "core/entry.h"
#include "core/tensor.h"

using namespace anabranch;

extern "C" ab_status ab_load_balance_loss(const ab_load_balance_loss_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  LoadBalanceLoss op;
  AB_RETURN_IF_ERROR(check_load_balance_loss(args, &op));
  double loss = 0.0;
  for (int64_t b = 0; b < op.B; ++b) {
    const double N = op.num_tokens[b];
    // d loss / d score_sum[b, e] = factor * tokens_per_expert[b, e]
    const double factor = N > 0 ? op.coeff_per_topk / (N * N) : 0.0;
    for (int64_t i = b * op.E; i < (b + 1) * op.E; ++i) {
      const double gradient = factor * op.tokens_per_expert[i];
      if (N > 0) loss += gradient * op.score_sum[i];
      if (op.d_score_sum != nullptr) op.d_score_sum[i] = static_cast<float>(gradient);
    }
  }
  if (op.loss != nullptr) *op.loss = static_cast<float>(loss);
  return ok();
}
