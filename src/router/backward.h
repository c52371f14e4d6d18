// The router's backward pass: its checked arguments, and one kernel per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "anabranch/router.h"
#include "balance/token_blocks.h"
#include "core/isa.h"
#include "router/map_format.h"

namespace anabranch {

// A cotangent of any float dtype; NULL data: zero.
struct Cotangent {
  const void* data = nullptr;
  int32_t dtype = 0;
};

// The selection of the forward pass: [T, K] indices or a map of the experts.
struct GivenSelection {
  const void* data = nullptr;
  int32_t dtype = 0;  // dtype of the indices
  MapFormat format = MapFormat::indices;
};

struct RouterBackward {
  int64_t T = 0;
  int64_t E = 0;
  int32_t K = 0;
  int32_t score_function = AB_SOFTMAX;
  bool normalize = true;
  float scaling_factor = 1.0f;

  const void* logits = nullptr;
  int32_t logits_dtype = 0;
  const int32_t* experts = nullptr;  // [T, K]: the selection as int32 indices, if it is given or converted to that form
  const uint8_t* token_mask = nullptr;
  const float* lse = nullptr;

  Cotangent d_weights;
  Cotangent d_probs;
  Cotangent d_score_sum;
  Cotangent d_aux_scores;
  Cotangent d_lse;
  // derived from the arguments:
  bool weighted = false;      // a cotangent of weights or probs is given
  bool auxiliary = false;     // a cotangent of auxiliary scores or their sums is given
  bool softmax_rows = false;  // softmax over all experts is needed

  void* d_logits = nullptr;
  int32_t d_logits_dtype = 0;  // that of the logits; beside float32 logits any float dtype

  TokenBlocks blocks{0, 0};  // blocks within the sequences of d_score_sum

  GivenSelection selection;
};

struct RouterBackwardKernels {
  // Computes d_logits of the tokens begin <= t < end, all of which belong to sequence `sequence`.
  void (*run)(const RouterBackward& op, int64_t sequence, int64_t begin, int64_t end, void* scratch);
  // Bytes of scratch memory of one call.
  size_t (*scratch_size)(const RouterBackward& op);
};

AB_DECLARE_ISA(RouterBackwardKernels, kRouterBackward)

}  // namespace anabranch
