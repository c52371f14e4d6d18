// Splits the experts' backward pass into two calls, for the tests of both backends.
#pragma once

#include "anabranch/experts.h"

namespace anabranch::testing {

struct TwoCalls {
  ab_expert_ffn_backward_args first;
  ab_expert_ffn_backward_args second;
};

// all: arguments of a single call. weighted_a [R, F]: holds w a between the calls. The gradients of W_out and its
// adapter are computed in the first call or in the second.
inline TwoCalls in_two_calls(const ab_expert_ffn_backward_args& all, const ab_tensor* weighted_a,
                             bool w_out_comes_first) {
  TwoCalls calls{all, all};
  auto& [first, second] = calls;
  first.dx_rows = first.d_w_in = first.d_b_in = first.d_lora_a_in = first.d_lora_b_in = nullptr;
  first.weighted_a = weighted_a;
  second.h = second.d_weights = nullptr;
  if (w_out_comes_first) {
    second.d_w_out = second.d_b_out = second.d_out = nullptr;
    second.weighted_a = second.d_lora_a_out = second.d_lora_b_out = second.lora_v_out = nullptr;
  } else {
    first.d_w_out = first.d_b_out = first.d_lora_a_out = first.d_lora_b_out = nullptr;
    second.weighted_a = weighted_a;
  }
  return calls;
}

}  // namespace anabranch::testing
