// Random valid calls of every operation. On the emulated GPU sizes are smaller, and there is no FP8, which requires
// Hopper's tensor cores.
#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include "anabranch/balance.h"
#include "anabranch/cuda.h"
#include "anabranch/dispatch.h"
#include "anabranch/experts.h"
#include "anabranch/router.h"
#include "call.h"
#include "routing.h"

namespace anabranch::fuzz {
namespace {

using Shape = std::vector<int64_t>;

// Expands to the name of an argument and its field.
#define ARGUMENT(field) #field, &args->field

int32_t any_float(Random& random) { return random.one_of<int32_t>({AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}); }
int32_t any_dtype(Random& random) { return static_cast<int32_t>(random.between(AB_BOOL, AB_FLOAT32)); }
int32_t any_count(Random& random) {
  return random.one_of<int32_t>({AB_UINT8, AB_INT16, AB_INT32, AB_INT64, AB_BFLOAT16, AB_FLOAT16, AB_FLOAT32});
}
int64_t any_width(Random& random) { return random.one_of<int64_t>({0, 1, 3, 8, 17, 64}); }

// Sizes shared by several operations. Mostly small; sometimes large enough for several threads.
struct Sizes {
  int64_t T, E, K, R, D, F, P, B;

  explicit Sizes(Random& random) {
    const bool large = random.chance(0.02);
    T = kEmulated ? random.one_of<int64_t>({0, 1, 2, 5, 9, 33, 70})
        : large   ? random.between(300, 1000)
                  : random.one_of<int64_t>({0, 1, 2, 5, 33, 140, 260});
    E = large ? random.between(1, 8) : random.one_of<int64_t>({1, 2, 3, 4, 8, 16, 33, 65, kEmulated ? 65 : 130});
    K = random.between(1, T <= 40 && random.chance(0.2) ? E : std::min<int64_t>(E, 4));
    R = random.chance(0.5) ? T * K : random.one_of<int64_t>({0, 1, 7, 16, 40, 100, kEmulated ? 130 : 300});
    D = large ? 256 : any_width(random);
    F = large ? random.between(32, 64) : any_width(random);
    P = random.between(1, 2);
    B = T % 5 == 0 && T > 0 && random.chance(0.5) ? 5 : 1;
  }
  // Sizes for quantised operands. Few experts, because each matrix is large.
  static Sizes quantizable(Random& random) {
    Sizes s(random);
    s.T = std::min<int64_t>(s.T, 140);
    s.E = std::min<int64_t>(s.E, 3);
    s.K = std::min(s.K, s.E);
    s.R = random.chance(0.5) ? s.T * s.K : std::min<int64_t>(s.R, 140);
    s.D = random.one_of<int64_t>({0, 128, 128, 256});
    s.F = random.one_of<int64_t>({0, 128, 128, 256});
    return s;
  }

  // Sizes for the router. E, K and T > 512 select its kernels.
  static Sizes routed(Random& random) {
    Sizes s(random);
    if (!kEmulated) return s;
    if (random.chance(0.1)) s.T = random.one_of<int64_t>({513, 600});
    if (random.chance(0.2)) s.E = random.one_of<int64_t>({128, 200, 256, 390, 512});
    if (random.chance(0.02)) {  // more experts than fit in registers
      s.T = std::min<int64_t>(s.T, 9);
      s.E = random.one_of<int64_t>({1025, 1100});
    }
    if (s.T <= 40 && random.chance(0.1)) s.K = random.between(1, std::min<int64_t>(s.E, 70));
    s.B = s.T % 5 == 0 && s.T > 0 && random.chance(0.5) ? 5 : 1;
    return s;
  }

  Shape statistics(Random& random) const { return B == 1 && random.chance(0.5) ? Shape{E} : Shape{B, E}; }
};

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
  if (random.chance(0.5)) call->output(ARGUMENT(lse), AB_FLOAT32, {s.T});
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
  call->output(ARGUMENT(d_logits), dtype, {s.T, s.E}).scale = 16.0 * static_cast<double>(s.K);
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

void make_plan(const Operation& operation, Random& random, Call* call) {
  const Sizes s(random);
  auto* args = call->start<ab_plan_args>(operation);
  args->num_experts = static_cast<int32_t>(s.E);
  args->align_size = random.one_of<int32_t>({0, 0, 1, 2, 3, 8});
  if (random.chance(0.4)) args->num_destinations = s.E % 3 == 0 ? 3 : s.E % 2 == 0 ? 2 : 1;
  const int64_t region = std::max<int64_t>(args->align_size, 1) * std::max<int64_t>(args->num_destinations, 1);
  int64_t T = s.T;
  int64_t K = s.K;
  const bool by_map = random.chance(0.6);
  if (by_map) {
    K = s.E;
    const bool bits = random.chance(0.5);
    call->input(ARGUMENT(routing_map), bits ? AB_UINT8 : AB_BOOL, {T, bits ? (K + 7) / 8 : K});
    if (random.chance(0.5)) call->output(ARGUMENT(row_id_map), AB_INT32, {T, 2 * s.E + 1});
  } else {
    if (!kEmulated && random.chance(0.01)) T = 100000 / K;  // several CTAs
    call->input(ARGUMENT(experts), AB_INT32, {T, K}, s.E);
  }
  if (random.chance(0.7)) call->output(ARGUMENT(tokens_per_expert), AB_INT32, {s.E});
  if (random.chance(0.7)) call->output(ARGUMENT(group_sizes), AB_INT32, {s.E});
  if (random.chance(0.7)) call->output(ARGUMENT(offsets), AB_INT32, {s.E + 1});
  if (random.chance(0.7)) call->output(ARGUMENT(row_of_slot), AB_INT32, {T, K});
  call->output(ARGUMENT(slot_of_row), AB_INT32, {(s.R + region - 1) / region * region});
  if (random.chance(0.7)) call->output(ARGUMENT(dropped), AB_INT32, {});
  call->options = {{"num_experts", &args->num_experts},
                   {"align_size", &args->align_size},
                   {"num_destinations", &args->num_destinations}};
}

// Adds gather and scatter indices that often refer to each other.
void add_maps(const Sizes& s, const ab_tensor** row_of_slot, const ab_tensor** slot_of_row, Call* call) {
  call->input("row_of_slot", row_of_slot, AB_INT32, {s.T, s.K}, s.R);
  if (slot_of_row != nullptr) call->input("slot_of_row", slot_of_row, AB_INT32, {s.R}, s.T * s.K);
}

void make_dispatch(const Operation& operation, Random& random, Call* call) {
  const Sizes s(random);
  auto* args = call->start<ab_dispatch_args>(operation);
  const bool weighted = random.chance(0.4);
  const int32_t dtype = weighted ? any_float(random) : any_dtype(random);
  call->input(ARGUMENT(x), dtype, {s.T, s.D});
  add_maps(s, &args->row_of_slot, &args->slot_of_row, call);
  if (weighted) call->input(ARGUMENT(weights), any_float(random), {s.T, s.K});
  const bool converts = dtype >= AB_FLOAT16 && random.chance(0.4);
  call->output(ARGUMENT(rows), converts ? any_float(random) : dtype, {s.R, s.D}).exact = true;
}

void make_combine(const Operation& operation, Random& random, Call* call) {
  const Sizes s(random);
  auto* args = call->start<ab_combine_args>(operation);
  call->input(ARGUMENT(rows), any_float(random), {s.R, s.D});
  add_maps(s, &args->row_of_slot, nullptr, call);
  if (random.chance(0.5)) call->input(ARGUMENT(weights), any_float(random), {s.T, s.K});
  const int32_t dtype = any_float(random);
  const bool in_place = random.chance(0.2);
  const Operand* addend = nullptr;
  if (in_place || random.chance(0.4)) {
    addend = &call->input(ARGUMENT(addend), in_place ? dtype : any_float(random), {s.T, s.D});
  }
  Operand& out = call->output(ARGUMENT(out), dtype, {s.T, s.D});
  out.in = in_place ? addend : nullptr;
  out.exact = true;
}

void make_combine_backward(const Operation& operation, Random& random, Call* call) {
  const Sizes s(random);
  auto* args = call->start<ab_combine_backward_args>(operation);
  const bool d_weights = random.chance(0.6);
  call->input(ARGUMENT(d_out), any_float(random), {s.T, s.D});
  if (d_weights || random.chance(0.2)) call->input(ARGUMENT(rows), any_float(random), {s.R, s.D});
  add_maps(s, &args->row_of_slot, &args->slot_of_row, call);
  if (random.chance(0.6)) call->input(ARGUMENT(weights), any_float(random), {s.T, s.K});
  call->in_float32 = true;
  if (random.chance(0.8)) call->output(ARGUMENT(d_rows), any_float(random), {s.R, s.D}).exact = true;
  if (d_weights) {
    // Terms are products of numbers up to 4.
    call->output(ARGUMENT(d_weights), any_float(random), {s.T, s.K}).scale = 16.0 * static_cast<double>(s.D);
  }
}

void make_sort_chunks(const Operation& operation, Random& random, Call* call) {
  const Sizes s(random);
  auto* args = call->start<ab_sort_chunks_args>(operation);
  args->inverse = static_cast<int32_t>(random.between(0, 1));
  const int64_t S = random.one_of<int64_t>({0, 1, 3, 9, 40});
  const int32_t dtype = any_dtype(random);
  call->input(ARGUMENT(x), dtype, {s.R, s.D});
  call->input(ARGUMENT(split_sizes), AB_INT32, {S}, 40);
  call->input(ARGUMENT(sorted_indices), AB_INT32, {S}, S);
  call->output(ARGUMENT(out), dtype, {s.R, s.D}).exact = true;
  if (random.chance(0.6)) call->output(ARGUMENT(row_id_map), AB_INT32, {s.R});
  call->options = {{"inverse", &args->inverse}};
}

void make_expand_row_id_map(const Operation& operation, Random& random, Call* call) {
  const Sizes s(random);
  auto* args = call->start<ab_expand_row_id_map_args>(operation);
  call->input(ARGUMENT(row_id_map), AB_INT32, {s.T, 2 * s.E + 1}, std::min(s.E, s.R));
  if (random.chance(0.5)) call->input(ARGUMENT(pad_offsets), AB_INT32, {s.E}, 8);
  call->output(ARGUMENT(row_of_slot), AB_INT32, {s.T, s.E});
  call->output(ARGUMENT(slot_of_row), AB_INT32, {s.R});
}

void make_quantize_rows(const Operation& operation, Random& random, Call* call) {
  const Sizes s = Sizes::quantizable(random);
  auto* args = call->start<ab_quantize_rows_args>(operation);
  args->fp8_scales = static_cast<int32_t>(random.between(0, 1));
  call->input(ARGUMENT(x), any_float(random), {s.R, s.D});
  call->output(ARGUMENT(q), AB_FLOAT8_E4M3, {s.R, s.D});
  call->output(ARGUMENT(scales), AB_FLOAT32, {s.R, s.D / 128}).exact = true;
  call->options = {{"fp8_scales", &args->fp8_scales}};
}

void make_quantize_weights(const Operation& operation, Random& random, Call* call) {
  const Sizes s = Sizes::quantizable(random);
  auto* args = call->start<ab_quantize_weights_args>(operation);
  args->fp8_scales = static_cast<int32_t>(random.between(0, 1));
  const bool has_parts = random.chance(0.5);
  const int64_t P = has_parts && random.chance(0.2) ? 3 : s.P;
  call->input(ARGUMENT(w), any_float(random), has_parts ? Shape{s.E, s.D, P, s.F} : Shape{s.E, s.D, s.F});
  const bool as_it_is = random.chance(0.7);
  if (as_it_is) {
    call->output(ARGUMENT(q), AB_FLOAT8_E4M3, has_parts ? Shape{s.E, s.D, P, s.F} : Shape{s.E, s.D, s.F});
  }
  if (!as_it_is || random.chance(0.5)) {
    call->output(ARGUMENT(q_transposed), AB_FLOAT8_E4M3, has_parts ? Shape{s.E, P, s.F, s.D} : Shape{s.E, s.F, s.D});
  }
  call->output(ARGUMENT(scales), AB_FLOAT32,
               has_parts ? Shape{s.E, s.D / 128, P, s.F / 128} : Shape{s.E, s.D / 128, s.F / 128})
      .exact = true;
  call->options = {{"fp8_scales", &args->fp8_scales}};
}

// Chooses the precision and sizes that it allows.
template <class Args>
Sizes choose_precision(Random& random, Args* args, Call* call) {
  call->has_infinities = false;  // an infinite float32 operand gives NaN on some GPUs (cuda.h)
  if (kEmulated || random.chance(0.7)) {
    args->precision = static_cast<int32_t>(random.between(0, 1));
    return Sizes(random);
  }
  args->precision = AB_PRECISION_FP8;
  args->fp8_scales = static_cast<int32_t>(random.between(0, 1));
  return Sizes::quantizable(random);
}

// Adds x and w of a GEMM, each possibly quantised. Returns the dtype of the result.
template <class Args>
int32_t add_operands(const Sizes& s, Random& random, Args* args, Call* call) {
  const bool fp8 = args->precision == AB_PRECISION_FP8;
  const int32_t dtype = any_float(random);
  const bool quantized_x = fp8 && random.chance(0.5);
  const bool quantized_w = fp8 && random.chance(0.5);
  const bool transposed = args->transpose_w == 1;
  call->input(ARGUMENT(x), quantized_x ? int32_t{AB_FLOAT8_E4M3} : dtype, {s.R, s.D});
  if (quantized_x) call->input(ARGUMENT(x_scales), AB_FLOAT32, {s.R, s.D / 128});
  if (!quantized_w || random.chance(0.3)) {
    call->input(ARGUMENT(w), fp8 ? any_float(random) : dtype, transposed ? Shape{s.E, s.F, s.D} : Shape{s.E, s.D, s.F});
  }
  if (quantized_w) {
    call->input(ARGUMENT(w_q), AB_FLOAT8_E4M3, {s.E, s.F, s.D});
    call->input(ARGUMENT(w_scales), AB_FLOAT32,
                transposed ? Shape{s.E, s.F / 128, s.D / 128} : Shape{s.E, s.D / 128, s.F / 128});
  }
  call->input(ARGUMENT(group_sizes), AB_INT32, {s.E}, 2 * s.R / s.E + 1);
  return quantized_x ? any_float(random) : dtype;
}

// Sets the strides of a tensor whose axes have this order in memory, outermost first.
void set_order(const Shape& order, Operand* operand) {
  operand->strides.assign(AB_MAX_RANK, 0);
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    operand->strides[static_cast<size_t>(order[i])] = stride;
    stride *= std::max<int64_t>(operand->view.shape[order[i]], 1);
  }
  operand->view.strides = operand->strides.data();
}

// Adapters. They use a copy of the random numbers, so that calls without an adapter stay as they were.
bool has_adapter(Random& random) { return random.chance(0.3); }
int64_t any_rank(Random& random) { return random.one_of<int64_t>({1, 2, 5, 16, 70}); }
int64_t any_sharing(Random& random, int64_t E) { return random.chance(0.3) ? 1 : E; }

// A factor of the dtype of the rows or float32, in any memory order; experts may share a factor through a stride of 0.
void add_factor(const char* name, const ab_tensor** field, Random& random, int32_t dtype, const Shape& shape,
                Call* call) {
  Operand& factor = call->input(name, field, random.chance(0.5) ? dtype : int32_t{AB_FLOAT32}, shape);
  if (random.chance(0.5)) return;
  Shape order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.bits() % i]);
  set_order(order, &factor);
  if (random.chance(0.2)) factor.strides[0] = 0;
}

// Adds the adapter of a grouped GEMM.
template <class Args>
void add_adapter(const Sizes& s, Random random, int32_t dtype, Args* args, Call* call) {
  if (!has_adapter(random)) return;
  const int64_t rank = any_rank(random);
  const bool has_u = args->x_scales != nullptr || random.chance(0.3);
  add_factor(ARGUMENT(lora_b), random, dtype, {any_sharing(random, s.E), rank, s.F}, call);
  if (has_u) {
    call->input(ARGUMENT(lora_u), dtype, {s.R, rank});
    return;
  }
  args->lora_scale = random.one_of({1.0f, 0.5f, -2.0f, 0.0f});
  call->numbers.push_back({"lora_scale", &args->lora_scale});
  add_factor(ARGUMENT(lora_a), random, dtype, {any_sharing(random, s.E), s.D, rank}, call);
  if (random.chance(0.5)) call->output(ARGUMENT(lora_u), dtype, {s.R, rank});
}

// Adds the adapters of the expert MLP. The ranks are 0 without an adapter.
struct Ranks {
  int64_t in = 0;
  int64_t out = 0;
};
template <class Args>
Ranks add_adapters(const Sizes& s, Random& random, int32_t dtype, Args* args, Call* call) {
  Ranks ranks;
  if (args->x != nullptr && has_adapter(random)) {
    ranks.in = any_rank(random);
    args->lora_scale_in = 0.5f;
    call->numbers.push_back({"lora_scale_in", &args->lora_scale_in});
    add_factor(ARGUMENT(lora_a_in), random, dtype, {any_sharing(random, s.E), s.D, ranks.in}, call);
    add_factor(ARGUMENT(lora_b_in), random, dtype, {any_sharing(random, s.E), ranks.in, s.P, s.F}, call);
  }
  if (has_adapter(random)) {
    ranks.out = any_rank(random);
    args->lora_scale_out = -2.0f;
    call->numbers.push_back({"lora_scale_out", &args->lora_scale_out});
    add_factor(ARGUMENT(lora_a_out), random, dtype, {any_sharing(random, s.E), s.F, ranks.out}, call);
    add_factor(ARGUMENT(lora_b_out), random, dtype, {any_sharing(random, s.E), ranks.out, s.D}, call);
  }
  return ranks;
}

// A gradient of a factor: has its shape, and its dtype or float32.
void add_gradient(const char* name, const ab_tensor** field, Random& random, const ab_tensor* factor,
                  const int32_t* accumulate, Call* call) {
  const int32_t dtype = *accumulate == 1 || random.chance(0.3) ? int32_t{AB_FLOAT32} : factor->dtype;
  call->output(name, field, dtype, Shape(factor->shape, factor->shape + factor->rank)).is_read = [accumulate] {
    return *accumulate == 1;
  };
}

void make_grouped_matmul(const Operation& operation, Random& random, Call* call) {
  auto* args = call->start<ab_grouped_matmul_args>(operation);
  const Sizes s = choose_precision(random, args, call);
  args->transpose_w = static_cast<int32_t>(random.between(0, 1));
  const int32_t dtype = add_operands(s, random, args, call);
  call->output(ARGUMENT(y), dtype, {s.R, s.F});
  add_adapter(s, random, dtype, args, call);
  call->options = {
      {"transpose_w", &args->transpose_w}, {"precision", &args->precision}, {"fp8_scales", &args->fp8_scales}};
}

void make_grouped_matmul_dw(const Operation& operation, Random& random, Call* call) {
  const Sizes s(random);
  auto* args = call->start<ab_grouped_matmul_dw_args>(operation);
  call->has_infinities = false;
  args->precision = static_cast<int32_t>(random.between(0, 1));
  args->accumulate = random.chance(0.3) ? 1 : 0;
  call->input(ARGUMENT(x), any_float(random), {s.R, s.D});
  call->input(ARGUMENT(d_y), any_float(random), {s.R, s.F});
  call->input(ARGUMENT(group_sizes), AB_INT32, {s.E}, 2 * s.R / s.E + 1);
  const int32_t dtype = args->accumulate == 1 ? AB_FLOAT32 : any_float(random);
  Random sharing = random;
  const int64_t matrices = any_sharing(sharing, s.E);
  call->output(ARGUMENT(d_w), dtype, {matrices, s.D, s.F}).is_read = [args] { return args->accumulate == 1; };
  call->options = {{"accumulate", &args->accumulate}, {"precision", &args->precision}};
}

void make_grouped_matmul_combine(const Operation& operation, Random& random, Call* call) {
  auto* args = call->start<ab_grouped_matmul_combine_args>(operation);
  const Sizes s = choose_precision(random, args, call);
  args->transpose_w = static_cast<int32_t>(random.between(0, 1));
  args->skip_rest = random.chance(0.3) ? 1 : 0;
  const bool weighted = random.chance(0.5);
  args->weight_early = weighted && random.chance(0.5) ? 1 : 0;
  const int32_t dtype = add_operands(s, random, args, call);
  if (random.chance(0.4)) call->input(ARGUMENT(bias), dtype, {s.E, s.F});
  add_maps(s, &args->row_of_slot, &args->slot_of_row, call);
  if (weighted) call->input(ARGUMENT(weights), any_float(random), {s.T, s.K});
  const int32_t out = args->x_scales != nullptr ? dtype : any_float(random);
  const bool in_place = random.chance(0.2);
  const Operand* addend = nullptr;
  if (in_place || random.chance(0.3)) {
    addend = &call->input(ARGUMENT(addend), in_place ? out : any_float(random), {s.T, s.F});
  }
  Operand& result = call->output(ARGUMENT(out), out, {s.T, s.F});
  result.in = in_place ? addend : nullptr;
  result.skips = &args->skip_rest;  // random indices do name tail rows
  add_adapter(s, random, args->x_scales != nullptr ? out : dtype, args, call);
  call->options = {{"transpose_w", &args->transpose_w}, {"weight_early", &args->weight_early},
                   {"skip_rest", &args->skip_rest},     {"backward", &args->backward},
                   {"precision", &args->precision},     {"fp8_scales", &args->fp8_scales}};
}

// FP8 accepts weights of any float dtype, because it quantises them.
template <class Args>
int32_t dtype_of_weights(Random& random, const Args* args, int32_t dtype) {
  return args->precision == AB_PRECISION_FP8 ? any_float(random) : dtype;
}

// Adds x of the network. The forward pass also accepts quantised rows, with x or instead of it.
void add_rows(const Shape& shape, Random& random, int32_t dtype, ab_expert_ffn_forward_args* args, Call* call) {
  const bool quantized = args->precision == AB_PRECISION_FP8 && random.chance(0.4);
  if (quantized) {
    call->input(ARGUMENT(x_q), AB_FLOAT8_E4M3, shape);
    call->input(ARGUMENT(x_scales), AB_FLOAT32, {shape[0], shape[1] / 128});
  }
  if (!quantized || random.chance(0.5)) call->input(ARGUMENT(x), dtype, shape);
}
void add_rows(const Shape& shape, Random&, int32_t dtype, ab_expert_ffn_backward_args* args, Call* call) {
  call->input(ARGUMENT(x), dtype, shape);
}

// Adds the inputs that the forward and backward pass of the expert MLP share. Returns their dtype.
template <class Args>
int32_t add_network(const Sizes& s, Random& random, Args* args, Call* call) {
  args->activation = static_cast<int32_t>(random.between(AB_SILU, s.P == 2 ? AB_SITU : AB_LINEAR));
  const auto parameter = [&] { return random.one_of({0.05f, 0.5f, 1.25f, 1.702f, 7.0f, 30.0f}); };
  if (args->activation == AB_SWIGLU_OAI || args->activation == AB_SITU) args->activation_alpha = parameter();
  if (args->activation >= AB_SWIGLU_CLAMPED) args->activation_limit = parameter();
  const int32_t dtype = any_float(random);
  const bool by_slot = random.chance(0.5);
  args->topk = by_slot ? static_cast<int32_t>(s.K) : 0;
  add_rows({by_slot ? s.T : s.R, s.D}, random, dtype, args, call);
  // On a GPU, two rows with the same slot race: d_weights is the gradient of one of them.
  if (by_slot) call->input(ARGUMENT(slot_of_row), AB_INT32, {s.R}, s.T * s.K).distinct = kEmulated;
  call->input(ARGUMENT(group_sizes), AB_INT32, {s.E}, 2 * s.R / s.E + 1);
  call->input(ARGUMENT(w_in), dtype_of_weights(random, args, dtype), {s.E, s.D, s.P, s.F});
  call->options = {{"activation", &args->activation},
                   {"topk", &args->topk},
                   {"skip_rest", &args->skip_rest},
                   {"precision", &args->precision},
                   {"fp8_scales", &args->fp8_scales}};
  call->numbers = {{"activation_alpha", &args->activation_alpha}, {"activation_limit", &args->activation_limit}};
  return dtype;
}

// Adds quantised weights next to the others. The forward pass requires the transposed ones.
template <class Args>
void add_quantized_weights(const Sizes& s, Random& random, bool transposed, Args* args, Call* call) {
  if (args->precision != AB_PRECISION_FP8) return;
  if (random.chance(0.5)) {
    call->input(ARGUMENT(w_in_q), AB_FLOAT8_E4M3, transposed ? Shape{s.E, s.P, s.F, s.D} : Shape{s.E, s.D, s.P, s.F});
    call->input(ARGUMENT(w_in_scales), AB_FLOAT32, {s.E, s.D / 128, s.P, s.F / 128});
  }
  if (args->w_out != nullptr && random.chance(0.5)) {
    call->input(ARGUMENT(w_out_q), AB_FLOAT8_E4M3, transposed ? Shape{s.E, s.D, s.F} : Shape{s.E, s.F, s.D});
    call->input(ARGUMENT(w_out_scales), AB_FLOAT32, {s.E, s.F / 128, s.D / 128});
  }
}

// Chooses one of the memory layouts of experts.h for the weights and the tensors that follow their layout.
void choose_layout(Random& random, Call* call) {
  const Shape in = random.one_of<Shape>({{0, 1, 2, 3}, {0, 2, 3, 1}, {0, 1, 3, 2}, {0, 3, 2, 1}});
  const Shape out = random.one_of<Shape>({{0, 1, 2}, {0, 2, 1}});
  const bool interleaved = std::find(in.begin(), in.end(), 3) < std::find(in.begin(), in.end(), 2);
  const Shape intermediate = interleaved ? Shape{0, 2, 1} : Shape{0, 1, 2};
  const std::map<std::string, Shape> orders = {{"w_in", in},           {"d_w_in", in},          {"w_out", out},
                                               {"d_w_out", out},       {"h", intermediate},     {"dh", intermediate},
                                               {"b_in", intermediate}, {"d_b_in", intermediate}};
  for (Operand& operand : call->operands) {
    const auto found = orders.find(operand.name);
    if (found != orders.end()) set_order(found->second, &operand);
  }
}

template <class Args>
Shape slots_of(const Sizes& s, const Args* args) {
  return args->slot_of_row != nullptr ? Shape{s.T, s.K} : Shape{s.R};
}

void make_expert_ffn_forward(const Operation& operation, Random& random, Call* call) {
  auto* args = call->start<ab_expert_ffn_forward_args>(operation);
  const Sizes s = choose_precision(random, args, call);
  const int32_t dtype = add_network(s, random, args, call);
  const bool without_y = random.chance(0.25);
  const bool weighted = random.chance(0.5);
  args->weight_early = weighted && (without_y || random.chance(0.5)) ? 1 : 0;
  args->skip_rest = random.chance(0.2) ? 1 : 0;
  if (random.chance(0.4)) call->input(ARGUMENT(b_in), dtype, {s.E, s.P, s.F});
  if (!without_y) call->input(ARGUMENT(w_out), dtype_of_weights(random, args, dtype), {s.E, s.F, s.D});
  add_quantized_weights(s, random, true, args, call);
  if (!without_y && random.chance(0.4)) call->input(ARGUMENT(b_out), dtype, {s.E, s.D});
  if (weighted) call->input(ARGUMENT(weights), any_float(random), slots_of(s, args));
  if (!without_y) call->output(ARGUMENT(y), dtype, {s.R, s.D});
  if (random.chance(0.6)) call->output(ARGUMENT(h), dtype, {s.R, s.P, s.F}).skips = &args->skip_rest;
  if (without_y || random.chance(0.4)) {
    const bool quantized = args->precision == AB_PRECISION_FP8 && random.chance(0.5);
    call->output(ARGUMENT(a), quantized ? int32_t{AB_FLOAT8_E4M3} : dtype, {s.R, s.F}).skips = &args->skip_rest;
    if (quantized) call->output(ARGUMENT(a_scales), AB_FLOAT32, {s.R, s.F / 128}).skips = &args->skip_rest;
  }
  if (random.chance(0.5)) choose_layout(random, call);
  Random adapters = random;
  const Ranks ranks = add_adapters(s, adapters, dtype, args, call);
  if (ranks.in > 0 && adapters.chance(0.5)) call->output(ARGUMENT(lora_u), dtype, {s.R, ranks.in});
  if (ranks.out > 0 && (without_y || adapters.chance(0.5))) call->output(ARGUMENT(lora_z), dtype, {s.R, ranks.out});
  call->options.push_back({"weight_early", &args->weight_early});
}

void make_expert_ffn_backward(const Operation& operation, Random& random, Call* call) {
  auto* args = call->start<ab_expert_ffn_backward_args>(operation);
  const Sizes s = choose_precision(random, args, call);
  const int32_t dtype = add_network(s, random, args, call);
  call->input(ARGUMENT(w_out), dtype_of_weights(random, args, dtype), {s.E, s.F, s.D});
  add_quantized_weights(s, random, false, args, call);
  if (random.chance(0.4)) call->input(ARGUMENT(b_out), dtype, {s.E, s.D});
  if (random.chance(0.5)) call->input(ARGUMENT(weights), any_float(random), slots_of(s, args));
  const bool has_h = random.chance(0.75);
  bool requests_d_w_in = random.chance(0.6);
  const bool requests_d_w_out = random.chance(0.6);
  const bool requests_d_b_out = random.chance(0.4);
  args->accumulate = (requests_d_w_in || requests_d_w_out) && random.chance(0.3) ? 1 : 0;
  args->skip_rest = has_h && random.chance(0.2) ? 1 : 0;
  Random adapters = random;
  const Ranks ranks = add_adapters(s, adapters, dtype, args, call);
  // Given rows u and v are zero in padding rows, which random ones are not. The backends read these rows differently.
  const bool gives_rows = !kEmulated || args->slot_of_row == nullptr;
  if (ranks.in > 0) {
    if (adapters.chance(0.5) && gives_rows) call->input(ARGUMENT(lora_u), dtype, {s.R, ranks.in});
    if (adapters.chance(0.5)) {
      add_gradient(ARGUMENT(d_lora_a_in), adapters, args->lora_a_in, &args->accumulate, call);
    }
    if (adapters.chance(0.5)) {
      add_gradient(ARGUMENT(d_lora_b_in), adapters, args->lora_b_in, &args->accumulate, call);
    }
  }
  if (ranks.out > 0) {
    if (adapters.chance(0.5)) {
      add_gradient(ARGUMENT(d_lora_a_out), adapters, args->lora_a_out, &args->accumulate, call);
    }
    if (adapters.chance(0.5)) {
      add_gradient(ARGUMENT(d_lora_b_out), adapters, args->lora_b_out, &args->accumulate, call);
    }
  }
  const bool requests_out_factors = args->d_lora_a_out != nullptr || args->d_lora_b_out != nullptr;
  const auto gradient = [&] { return args->accumulate == 1 || random.chance(0.3) ? int32_t{AB_FLOAT32} : dtype; };
  if (requests_d_w_in) {
    call->output(ARGUMENT(d_w_in), gradient(), {s.E, s.D, s.P, s.F}).is_read = [args] { return args->accumulate == 1; };
  }
  if (random.chance(0.5)) {
    call->output(ARGUMENT(dx_rows), dtype, {s.R, s.D});
  }
  if (random.chance(0.4)) {
    call->output(ARGUMENT(d_b_in), dtype, {s.E, s.P, s.F});
  }
  if (requests_d_w_out) {
    call->output(ARGUMENT(d_w_out), gradient(), {s.E, s.F, s.D}).is_read = [args] { return args->accumulate == 1; };
  }
  if (requests_d_b_out) call->output(ARGUMENT(d_b_out), dtype, {s.E, s.D});
  if (has_h || requests_d_w_out || requests_d_b_out || requests_out_factors) {
    const Shape shape = {args->slot_of_row != nullptr ? s.T : s.R, s.D};
    call->input(ARGUMENT(d_out), any_float(random), shape);
    if (has_h && args->precision == AB_PRECISION_FP8 && random.chance(0.4)) {
      call->input(ARGUMENT(d_out_q), AB_FLOAT8_E4M3, shape);
      call->input(ARGUMENT(d_out_scales), AB_FLOAT32, {shape[0], shape[1] / 128});
    }
  }
  if (args->precision == AB_PRECISION_FP8 && (has_h || args->dx_rows != nullptr) && random.chance(0.5)) {
    Operand& dh_q = call->output(ARGUMENT(dh_q), AB_FLOAT8_E4M3, {s.R, s.P, s.F});
    Operand& dh_scales = call->output(ARGUMENT(dh_scales), AB_FLOAT32, {s.R, s.P, s.F / 128});
    for (Operand* operand : {&dh_q, &dh_scales}) {
      operand->skips = &args->skip_rest;
      operand->is_read = [args] { return args->h == nullptr; };
    }
  }
  const bool needs_v_in = ranks.in > 0 && (args->dx_rows != nullptr || args->d_lora_a_in != nullptr);
  const auto add_v = [&](const char* name, const ab_tensor** field, int64_t rank, bool is_needed) {
    if (rank == 0 || !(has_h || is_needed) || adapters.chance(0.5)) return;
    if (has_h) {
      call->output(name, field, dtype, {s.R, rank}).is_read = [args] { return args->h == nullptr; };
    } else if (gives_rows) {
      call->input(name, field, dtype, {s.R, rank}).finite = true;
    }
  };
  add_v(ARGUMENT(lora_v_in), ranks.in, needs_v_in);
  add_v(ARGUMENT(lora_v_out), ranks.out, args->d_lora_a_out != nullptr);
  if (has_h) {
    const Operand& h = call->input(ARGUMENT(h), dtype, {s.R, s.P, s.F});
    if (random.chance(0.6)) {
      Operand& dh = call->output(ARGUMENT(dh), dtype, {s.R, s.P, s.F});
      dh.in = random.chance(0.5) ? &h : nullptr;
      dh.skips = &args->skip_rest;
      dh.is_read = [args] { return args->h == nullptr; };
    }
    if (random.chance(0.4)) {
      Operand& weighted_a = call->output(ARGUMENT(weighted_a), dtype, {s.R, s.F});
      weighted_a.skips = &args->skip_rest;
      weighted_a.is_read = [args] { return args->h == nullptr; };
    }
    if (random.chance(0.5)) call->output(ARGUMENT(d_weights), AB_FLOAT32, slots_of(s, args));
  } else {
    const bool dx_needs_dh = args->dx_rows != nullptr && args->dh_q == nullptr;
    if (dx_needs_dh || args->d_w_in != nullptr || args->d_b_in != nullptr || args->d_lora_b_in != nullptr ||
        (needs_v_in && args->lora_v_in == nullptr)) {
      call->input(ARGUMENT(dh), dtype, {s.R, s.P, s.F}).finite = true;
    }
    if (requests_d_w_out || requests_out_factors) call->input(ARGUMENT(weighted_a), dtype, {s.R, s.F}).finite = true;
  }
  call->options.push_back({"accumulate", &args->accumulate});
  if (random.chance(0.5)) choose_layout(random, call);
}

#undef ARGUMENT

template <class Args, ab_status (*kRun)(const Args*, const ab_exec*)>
ab_status run_as(const void* args, const ab_exec* exec) {
  return kRun(static_cast<const Args*>(args), exec);
}
template <class Args, ab_status (*kQuery)(const Args*, const ab_exec*, size_t*)>
ab_status query_as(const void* args, const ab_exec* exec, size_t* bytes) {
  return kQuery(static_cast<const Args*>(args), exec, bytes);
}

#define RUN(name, function) run_as<ab_##name##_args, function>
#define QUERY(name, function) query_as<ab_##name##_args, function##_workspace>
#define OPERATION(name, run, ...) \
  Operation { #name, "ab_" #name "_args", make_##name, RUN(name, run), __VA_ARGS__ }

}  // namespace

#if defined(ANABRANCH_FUZZ_EMULATED)
// The CUDA function together with the CPU function, for tests/emulation.
#define BESIDE_CPU(name, query, other_query) OPERATION(name, ab_cuda_##name, query, RUN(name, ab_##name), other_query)
#define WITH_WORKSPACE(name) BESIDE_CPU(name, QUERY(name, ab_cuda_##name), QUERY(name, ab_##name))
#define WITH_WORKSPACE_ON_CPU(name) BESIDE_CPU(name, nullptr, QUERY(name, ab_##name))
#define WITHOUT_WORKSPACE(name) BESIDE_CPU(name, nullptr, nullptr)
#else
#define WITH_WORKSPACE(name) OPERATION(name, ab_##name, QUERY(name, ab_##name))
#define WITH_WORKSPACE_ON_CPU(name) WITH_WORKSPACE(name)
#define WITHOUT_WORKSPACE(name) OPERATION(name, ab_##name, nullptr)
#endif

const std::vector<Operation> kOperations = {
    WITH_WORKSPACE(router_forward),       WITH_WORKSPACE(router_backward),
    WITHOUT_WORKSPACE(load_balance_loss), WITH_WORKSPACE(score_sum),
    WITH_WORKSPACE(moe_aux_loss),         WITH_WORKSPACE_ON_CPU(combine),
    WITHOUT_WORKSPACE(combine_backward),  WITH_WORKSPACE(plan),
    WITHOUT_WORKSPACE(dispatch),          WITH_WORKSPACE(sort_chunks),
    WITHOUT_WORKSPACE(expand_row_id_map), WITH_WORKSPACE(quantize_rows),
    WITH_WORKSPACE(quantize_weights),     WITH_WORKSPACE(grouped_matmul),
    WITH_WORKSPACE(grouped_matmul_dw),    WITH_WORKSPACE(grouped_matmul_combine),
    WITH_WORKSPACE(expert_ffn_forward),   WITH_WORKSPACE(expert_ffn_backward),
};

}  // namespace anabranch::fuzz
