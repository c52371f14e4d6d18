// The backward pass of the experts in two calls, which the tests of both backends make.
#pragma once

#include "anabranch/experts.h"

namespace anabranch::testing {

struct TwoCalls {
  ab_expert_ffn_backward_args first;
  ab_expert_ffn_backward_args second;
};

// all: of one call; weighted_a: [R, F], for w a. The gradient of W_out comes in the first call or in the second one.
inline TwoCalls in_two_calls(const ab_expert_ffn_backward_args& all, const ab_tensor* weighted_a,
                             bool w_out_comes_first) {
  TwoCalls calls{all, all};
  auto& [first, second] = calls;
  first.dx_rows = first.d_w_in = first.d_b_in = nullptr;
  first.weighted_a = weighted_a;
  second.h = second.d_weights = nullptr;
  if (w_out_comes_first) {
    second.d_w_out = second.d_b_out = second.d_out = nullptr;
  } else {
    first.d_w_out = first.d_b_out = nullptr;
    second.weighted_a = weighted_a;
  }
  return calls;
}

}  // namespace anabranch::testing
