// The load-balancing loss after its checks.
#pragma once

#include <cstdint>

#include "anabranch/balance.h"

namespace anabranch {

struct LoadBalanceLoss {
  int64_t B = 1;
  int64_t E = 0;
  double coeff_per_topk = 0.0;  // coeff * E / (K * B)
  const float* score_sum = nullptr;
  const int32_t* tokens_per_expert = nullptr;
  const int32_t* num_tokens = nullptr;
  float* loss = nullptr;
  float* d_score_sum = nullptr;
};

ab_status check_load_balance_loss(const ab_load_balance_loss_args* args, LoadBalanceLoss* op);

}  // namespace anabranch
