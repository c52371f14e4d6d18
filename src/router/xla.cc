#include "core/xla.h"
#include "anabranch/router.h"

namespace {

using anabranch::xla::Field;

constexpr Field kRouterForwardFields[] = {
    AB_INT32(ab_router_forward_args, topk),
    AB_INT32(ab_router_forward_args, score_function),
    AB_INT32(ab_router_forward_args, normalize),
    AB_INT32(ab_router_forward_args, num_groups),
    AB_INT32(ab_router_forward_args, group_topk),
    AB_FLOAT(ab_router_forward_args, scaling_factor),
    AB_TENSOR(ab_router_forward_args, logits),
    AB_TENSOR(ab_router_forward_args, expert_bias),
    AB_TENSOR(ab_router_forward_args, token_mask),
    AB_TENSOR(ab_router_forward_args, forced_experts),
    AB_TENSOR(ab_router_forward_args, weights),
    AB_TENSOR(ab_router_forward_args, experts),
    AB_TENSOR(ab_router_forward_args, tokens_per_expert),
    AB_TENSOR(ab_router_forward_args, score_sum),
    AB_TENSOR(ab_router_forward_args, lse),
    AB_TENSOR(ab_router_forward_args, probs),
    AB_TENSOR(ab_router_forward_args, routing_map),
    AB_TENSOR(ab_router_forward_args, aux_scores),
    AB_LATER_INT32(ab_router_forward_args, group_score_topk),
    AB_TENSOR(ab_router_forward_args, qb_bin_bounds),
    AB_TENSOR(ab_router_forward_args, qb_histogram),
};

constexpr Field kRouterBackwardFields[] = {
    AB_INT32(ab_router_backward_args, topk),         AB_INT32(ab_router_backward_args, score_function),
    AB_INT32(ab_router_backward_args, normalize),    AB_FLOAT(ab_router_backward_args, scaling_factor),
    AB_TENSOR(ab_router_backward_args, logits),      AB_TENSOR(ab_router_backward_args, experts),
    AB_TENSOR(ab_router_backward_args, token_mask),  AB_TENSOR(ab_router_backward_args, lse),
    AB_TENSOR(ab_router_backward_args, d_weights),   AB_TENSOR(ab_router_backward_args, d_probs),
    AB_TENSOR(ab_router_backward_args, d_score_sum), AB_TENSOR(ab_router_backward_args, d_aux_scores),
    AB_TENSOR(ab_router_backward_args, d_lse),       AB_TENSOR(ab_router_backward_args, d_logits),
};

}  // namespace

AB_XLA_HANDLER(router_forward, kRouterForwardFields, ab_router_forward_workspace);
AB_XLA_HANDLER(router_backward, kRouterBackwardFields, ab_router_backward_workspace);
