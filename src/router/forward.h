// The router's forward pass: what a checked call says, and its kernel for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "anabranch/router.h"
#include "balance/token_blocks.h"
#include "core/isa.h"
#include "router/map_format.h"

namespace anabranch {

struct RouterForward {
  int64_t T = 0;
  int64_t E = 0;
  int32_t K = 0;
  int32_t score_function = AB_SOFTMAX;
  bool normalize = true;
  int32_t num_groups = 0;  // 0: no groups
  int32_t group_topk = 0;
  int32_t group_score_topk = 0;   // how many of a group's experts make its score
  bool groups_by_logits = false;  // their logits do; else their scores with the bias
  float scaling_factor = 1.0f;

  const void* logits = nullptr;
  int32_t logits_dtype = 0;
  const void* bias = nullptr;
  int32_t bias_dtype = 0;
  const uint8_t* token_mask = nullptr;
  const int32_t* forced_experts = nullptr;

  float* weights = nullptr;
  int32_t* experts = nullptr;
  int32_t* tokens_per_expert = nullptr;
  float* score_sum = nullptr;
  float* lse = nullptr;
  void* probs = nullptr;  // dtype of the logits
  void* routing_map = nullptr;
  MapFormat map_format = MapFormat::none;
  int32_t map_dtype = 0;  // of indices
  float* aux_scores = nullptr;

  bool wants_weights = false;    // weights or probs
  bool wants_selection = false;  // or anything else that depends on which experts are selected
  bool forced = false;

  TokenBlocks blocks{0, 0};

  // Quantile balancing, where qb_histogram is not null.
  const float* qb_bin_bounds = nullptr;
  int32_t* qb_histogram = nullptr;  // [E, qb_bins]
  int64_t qb_bins = 0;

  // Experts of a token that are ranked: with quantile balancing one more than it gets.
  int32_t ranks() const { return K + (qb_histogram != nullptr ? 1 : 0); }
};

struct RouterForwardKernels {
  // Routes tokens begin <= t < end. counts[E] and score_sum[E], where not null, get the statistics of these tokens;
  // histogram [E, qb_bins], where not null, is added to.
  void (*route)(const RouterForward& op, int64_t begin, int64_t end, int32_t* counts, float* score_sum,
                int32_t* histogram, void* scratch);
  // Bytes of scratch memory of one call.
  size_t (*scratch_size)(const RouterForward& op);
};

AB_DECLARE_ISA(RouterForwardKernels, kRouterForward)

}  // namespace anabranch
