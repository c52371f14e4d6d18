// The router's forward pass: its checked arguments, and one kernel per instruction set.
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
  int32_t group_score_topk = 0;   // number of experts whose sum is the score of a group
  bool groups_by_logits = false;  // group scores sum logits; else biased scores
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
  int32_t map_dtype = 0;  // dtype of the indices
  float* aux_scores = nullptr;

  bool needs_weights = false;    // weights or probs
  bool needs_selection = false;  // weights, probs or any other output that depends on the selection
  bool forced = false;

  TokenBlocks blocks{0, 0};

  // quantile balancing, if qb_histogram is not null
  const float* qb_bin_bounds = nullptr;
  int32_t* qb_histogram = nullptr;  // [E, qb_bins]
  int64_t qb_bins = 0;

  // Number of experts per token that are ranked: K, or K + 1 with quantile balancing.
  int32_t ranks() const { return K + (qb_histogram != nullptr ? 1 : 0); }
};

struct RouterForwardKernels {
  // Routes tokens begin <= t < end. Writes their statistics to counts[E] and score_sum[E], and adds to histogram [E,
  // qb_bins]; each may be null.
  void (*route)(const RouterForward& op, int64_t begin, int64_t end, int32_t* counts, float* score_sum,
                int32_t* histogram, void* scratch);
  // Bytes of scratch memory of one call.
  size_t (*scratch_size)(const RouterForward& op);
};

AB_DECLARE_ISA(RouterForwardKernels, kRouterForward)

}  // namespace anabranch
