// Argument checks of low-rank adapters.
#pragma once

#include "anabranch/experts.h"
#include "experts/check.h"

namespace anabranch {

// Requires the first axis of a matrix that experts may share to be E or 1.
ab_status check_shared(const char* name, const ab_tensor* tensor, int64_t E);

// Check the adapter of a grouped GEMM, or those of a feed-forward network, and set their ranks. dtype: of u.
ab_status check_lora(const ab_grouped_matmul_args* args, int32_t dtype, GroupedSizes* s);
ab_status check_lora(const ab_grouped_matmul_combine_args* args, int32_t dtype, GroupedSizes* s);
ab_status check_lora(const ab_expert_ffn_forward_args* args, FfnSizes* s);
ab_status check_lora(const ab_expert_ffn_backward_args* args, FfnSizes* s);

// Whether an output needs w a, the operand of the gradients of W_out and its adapter.
inline bool needs_weighted_a(const ab_expert_ffn_backward_args& args) {
  return args.d_w_out != nullptr || args.d_lora_a_out != nullptr || args.d_lora_b_out != nullptr;
}

}  // namespace anabranch
