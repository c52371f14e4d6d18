// Random valid calls of the router and of the losses that balance experts.
#include "anabranch/balance.h"
#include "anabranch/router.h"
#include "calls.h"
#include "routing.h"

namespace anabranch::fuzz {

void make_router_forward(const Operation& operation, Random& random, Call* call) {
  const Sizes s = Sizes::routed(random);
  auto* args = call->start<ab_router_forward_args>(operation);
  args->topk = static_cast<int32_t>(s.K);
  args->score_function = static_cast<int32_t>(random.between(AB_SOFTMAX, AB_SQRTSOFTPLUS));
  args->normalize = static_cast<int32_t>(random.between(0, 1));
  args->scaling_factor = 1.0f;
  call->in_float32 = true;
  call->is_open = [call] { return selection_is_open(call->args_as<ab_router_forward_args>()); };
  const int32_t dtype = any_float(random);
  call->input(ARGUMENT(logits), dtype, {s.T, s.E});
  if (random.chance(0.3)) call->input(ARGUMENT(token_mask), AB_BOOL, {s.T});
  const bool forced = random.chance(0.2);
  const bool dense = !forced && random.chance(0.4);
  const bool weighted = random.chance(0.7);
  const bool selects = weighted || random.chance(0.7);
  if (weighted && dense && random.chance(0.7)) {
    call->output(ARGUMENT(probs), dtype, {s.T, s.E});
  } else if (weighted) {
    call->output(ARGUMENT(weights), AB_FLOAT32, {s.T, s.K});
  }
  const Shape statistics = s.statistics(random);
  if (selects) {
    if (!weighted || random.chance(0.8)) call->output(ARGUMENT(experts), AB_INT32, {s.T, s.K});
    if (random.chance(0.6)) call->output(ARGUMENT(tokens_per_expert), AB_INT32, statistics);
    if (forced) call->input(ARGUMENT(forced_experts), AB_INT32, {s.T, s.K}, s.E);
    const bool biased = !forced && random.chance(0.4);
    if (biased) call->input(ARGUMENT(expert_bias), any_float(random), {s.E});
    const bool balances = biased && s.K < s.E && random.chance(0.5);
    if (balances) {
      call->input(ARGUMENT(qb_bin_bounds), AB_FLOAT32, {2});
      call->output(ARGUMENT(qb_histogram), AB_INT32, {s.E, random.one_of<int64_t>({1, 2, 37, 300})}).fault =
          [call](const char* histogram) { return histogram_fault(call->args_as<ab_router_forward_args>(), histogram); };
    }
    if (!forced && !balances && s.E % 2 == 0 && s.K <= s.E / 2 && random.chance(0.3)) {
      args->num_groups = 2;
      args->group_topk = s.K % 2 == 0 ? static_cast<int32_t>(random.between(1, 2)) : 1;
      if (random.chance(0.5)) {
        args->group_topk = static_cast<int32_t>(random.between(1, 2));
        args->group_score_topk = static_cast<int32_t>(random.between(1, s.E / 2));
      }
    }
    if (dense && random.chance(0.7)) {
      switch (random.between(0, 2)) {
        case 0: call->output(ARGUMENT(routing_map), AB_BOOL, {s.T, s.E}); break;
        case 1: call->output(ARGUMENT(routing_map), AB_UINT8, {s.T, (s.E + 7) / 8}); break;
        default:
          call->output(ARGUMENT(routing_map), random.one_of<int32_t>({AB_INT16, AB_INT32, AB_INT64}), {s.T, s.K});
      }
    }
  }
  if (random.chance(0.5)) call->output(ARGUMENT(score_sum), AB_FLOAT32, statistics);
  // A logit and the logarithm of a sum, which may cancel.
  if (random.chance(0.5)) call->output(ARGUMENT(lse), AB_FLOAT32, {s.T}).scale = 8.0;
  if (dense && random.chance(0.5)) call->output(ARGUMENT(aux_scores), AB_FLOAT32, {s.T, s.E});
  if (weighted && random.chance(0.5)) args->scaling_factor = 2.5f;
  call->options = {{"topk", &args->topk},
                   {"score_function", &args->score_function},
                   {"normalize", &args->normalize},
                   {"num_groups", &args->num_groups},
                   {"group_topk", &args->group_topk},
                   {"group_score_topk", &args->group_score_topk}};
  call->numbers = {{"scaling_factor", &args->scaling_factor}};
}

void make_router_backward(const Operation& operation, Random& random, Call* call) {
  const Sizes s = Sizes::routed(random);
  auto* args = call->start<ab_router_backward_args>(operation);
  args->topk = static_cast<int32_t>(s.K);
  args->score_function = static_cast<int32_t>(random.between(AB_SOFTMAX, AB_SQRTSOFTPLUS));
  args->normalize = static_cast<int32_t>(random.between(0, 1));
  args->scaling_factor = 1.0f;
  call->in_float32 = true;
  const int32_t dtype = any_float(random);
  call->input(ARGUMENT(logits), dtype, {s.T, s.E});
  if (random.chance(0.3)) call->input(ARGUMENT(token_mask), AB_BOOL, {s.T});
  const bool weighted = random.chance(0.8);
  if (weighted) {
    const bool by_map = random.chance(0.3);
    if (by_map) {
      const bool bits = random.chance(0.5);
      call->input(ARGUMENT(routing_map), bits ? AB_UINT8 : AB_BOOL, {s.T, bits ? (s.E + 7) / 8 : s.E});
    } else {
      call->input(ARGUMENT(experts), random.one_of<int32_t>({AB_INT16, AB_INT32, AB_INT32, AB_INT64}), {s.T, s.K}, s.E);
    }
    if (by_map || random.chance(0.3)) {
      call->input(ARGUMENT(d_probs), any_float(random), {s.T, s.E});
    } else {
      call->input(ARGUMENT(d_weights), any_float(random), {s.T, s.K});
    }
    if (random.chance(0.5)) args->scaling_factor = 2.5f;
  }
  const bool auxiliary = random.chance(0.6);
  if (auxiliary && random.chance(0.5)) {
    call->input(ARGUMENT(d_score_sum), any_float(random), s.statistics(random));
  } else if (auxiliary) {
    call->input(ARGUMENT(d_aux_scores), any_float(random), {s.T, s.E});
  }
  const bool by_lse = random.chance(0.5);
  if (by_lse) call->input(ARGUMENT(d_lse), any_float(random), {s.T});
  const bool has_softmax = args->score_function == AB_SOFTMAX && (weighted || auxiliary);
  if ((by_lse || has_softmax) && random.chance(0.5)) {
    Operand& lse = call->input(ARGUMENT(lse), AB_FLOAT32, {s.T});
    lse.finite = true;
    lse.derive = [call](char* content) { fill_lse(call->operands.front(), content); };
  }
  const int32_t gradient_dtype = dtype == AB_FLOAT32 && random.chance(0.3) ? any_float(random) : dtype;
  call->output(ARGUMENT(d_logits), gradient_dtype, {s.T, s.E}).scale = 16.0 * static_cast<double>(s.K);
  call->options = {{"topk", &args->topk}, {"score_function", &args->score_function}, {"normalize", &args->normalize}};
  call->numbers = {{"scaling_factor", &args->scaling_factor}};
}

void make_load_balance_loss(const Operation& operation, Random& random, Call* call) {
  const Sizes s(random);
  call->in_float32 = true;
  auto* args = call->start<ab_load_balance_loss_args>(operation);
  args->topk = static_cast<int32_t>(s.K);
  args->coeff = 0.01f;
  const Shape statistics = s.statistics(random);
  call->input(ARGUMENT(score_sum), AB_FLOAT32, statistics).nonnegative = true;
  call->input(ARGUMENT(tokens_per_expert), any_count(random), statistics, s.T).nonnegative = true;
  call->input(ARGUMENT(num_tokens), random.one_of<int32_t>({AB_INT32, AB_INT64}),
              statistics.size() == 2 ? Shape{s.B} : Shape{}, s.T);
  if (random.chance(0.8)) call->output(ARGUMENT(loss), AB_FLOAT32, {});
  if (random.chance(0.8)) call->output(ARGUMENT(d_score_sum), AB_FLOAT32, statistics);
  call->options = {{"topk", &args->topk}};
  call->numbers = {{"coeff", &args->coeff}};
}

void make_moe_aux_loss(const Operation& operation, Random& random, Call* call) {
  const Sizes s(random);
  call->in_float32 = true;
  auto* args = call->start<ab_moe_aux_loss_args>(operation);
  args->topk = static_cast<int32_t>(s.K);
  args->num_experts = random.chance(0.5) ? static_cast<int32_t>(s.E) : 0;
  args->coeff = 0.01f;
  const int64_t C = random.between(1, 3) * s.E;
  const bool requests_loss = random.chance(0.8);
  if (requests_loss || random.chance(0.5)) call->input(ARGUMENT(probs), any_float(random), {s.T, C}).nonnegative = true;
  call->input(ARGUMENT(tokens_per_expert), any_count(random), {C}, s.T).nonnegative = true;
  if (random.chance(0.5)) call->input(ARGUMENT(num_tokens), random.one_of<int32_t>({AB_INT32, AB_INT64}), {}, s.T);
  if (requests_loss) call->output(ARGUMENT(loss), AB_FLOAT32, {});
  if (!requests_loss || random.chance(0.8)) {
    if (random.chance(0.5)) call->input(ARGUMENT(d_loss), any_float(random), {});
    call->output(ARGUMENT(d_probs), any_float(random), {s.T, C});
  }
  call->options = {{"topk", &args->topk}, {"num_experts", &args->num_experts}};
  call->numbers = {{"coeff", &args->coeff}};
}

void make_score_sum(const Operation& operation, Random& random, Call* call) {
  const Sizes s(random);
  call->in_float32 = true;
  auto* args = call->start<ab_score_sum_args>(operation);
  const int64_t E = random.chance(0.1) ? 0 : s.E;
  call->input(ARGUMENT(scores), any_float(random), {s.T, E}).nonnegative = true;
  call->output(ARGUMENT(score_sum), AB_FLOAT32, random.chance(0.5) ? Shape{s.B, E} : Shape{E});
}

}  // namespace anabranch::fuzz
