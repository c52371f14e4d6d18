// ab_load_balance_loss
#include "balance/loss.h"

#include "core/entry.h"
#include "core/tensor.h"

namespace anabranch {

void load_balance_loss(const LoadBalanceLoss& op) {
  double loss = 0.0;
  for (int64_t b = 0; b < op.B; ++b) {
    const double factor = loss_factor(op, b);
    for (int64_t i = b * op.E; i < (b + 1) * op.E; ++i) {
      const double gradient = loss_gradient(op, factor, i);
      if (factor != 0.0) loss += gradient * op.score_sum[i];
      if (op.d_score_sum != nullptr) op.d_score_sum[i] = static_cast<float>(gradient);
    }
  }
  if (op.loss != nullptr) *op.loss = static_cast<float>(loss);
}

}  // namespace anabranch

using namespace anabranch;

extern "C" ab_status ab_load_balance_loss(const ab_load_balance_loss_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  LoadBalanceLoss op;
  AB_RETURN_IF_ERROR(check_load_balance_loss(args, &op));
  load_balance_loss(op);
  return ok();
}
