// Random valid calls of the expert MLP.
#include <algorithm>
#include <map>
#include <string>

#include "expert_calls.h"

namespace anabranch::fuzz {
namespace {

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

// Sets the memory layouts of the weights and of the tensors that follow their layout.
void set_layouts(const Shape& in, const Shape& out, Call* call) {
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

// Chooses layouts of experts.h.
void choose_layout(Random& random, Call* call) {
  const Shape in = random.one_of<Shape>({{0, 1, 2, 3}, {0, 2, 3, 1}, {0, 1, 3, 2}, {0, 3, 2, 1}});
  set_layouts(in, random.one_of<Shape>({{0, 1, 2}, {0, 2, 1}}), call);
}

// Packs weights whose gradients are not requested.
template <class Args>
void pack_weights(Random random, bool requests_d_w_in, bool requests_d_w_out, Args* args, Call* call) {
  const bool packs_in = !requests_d_w_in && packs_a_weight(random);
  const bool packs_out = args->w_out != nullptr && !requests_d_w_out && packs_a_weight(random);
  if (args->precision == AB_PRECISION_FP8 || !(packs_in || packs_out)) return;
  const bool interleaved = random.chance(0.3);
  const Shape in = interleaved ? Shape{0, 3, 2, 1} : Shape{0, 2, 3, 1};
  const Shape out = {0, 2, 1};
  set_layouts(in, out, call);
  if (packs_in) pack_weight(ARGUMENT(w_in_block_scales), random, interleaved, in, args->w_in, call);
  if (packs_out) pack_weight(ARGUMENT(w_out_block_scales), random, false, out, args->w_out, call);
}

template <class Args>
Shape slots_of(const Sizes& s, const Args* args) {
  return args->slot_of_row != nullptr ? Shape{s.T, s.K} : Shape{s.R};
}

// The ranks of both adapters; 0: no adapter.
struct Ranks {
  int64_t in = 0;
  int64_t out = 0;
};

// Adds the adapters of the expert MLP.
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

// Adds the gradient of a factor. It has the shape of the factor, and its dtype or float32.
void add_gradient(const char* name, const ab_tensor** field, Random& random, const ab_tensor* factor,
                  const int32_t* accumulate, Call* call) {
  const int32_t dtype = *accumulate == 1 || random.chance(0.3) ? int32_t{AB_FLOAT32} : factor->dtype;
  call->output(name, field, dtype, Shape(factor->shape, factor->shape + factor->rank)).is_read = [accumulate] {
    return *accumulate == 1;
  };
}

// A copy of a factor in one of the orders of experts.h, which has undefined elements for experts without rows.
void add_copy(const char* name, const ab_tensor** field, Random& random, const ab_tensor* factor, int32_t dtype,
              Call* call) {
  static constexpr int32_t kHasUndefined = 1;
  Operand& copy = call->output(name, field, dtype, Shape(factor->shape, factor->shape + factor->rank));
  copy.skips = &kHasUndefined;
  set_order(factor->rank == 4 ? random.one_of<Shape>({{0, 1, 2, 3}, {0, 2, 3, 1}, {0, 1, 3, 2}, {0, 3, 2, 1}})
                              : random.one_of<Shape>({{0, 1, 2}, {0, 2, 1}}),
            &copy);
}

}  // namespace

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
  if (ranks.in > 0 && adapters.chance(0.3)) {
    add_copy(ARGUMENT(lora_a_in_copy), adapters, args->lora_a_in, dtype, call);
    add_copy(ARGUMENT(lora_b_in_copy), adapters, args->lora_b_in, dtype, call);
  }
  if (ranks.out > 0 && adapters.chance(0.3)) {
    add_copy(ARGUMENT(lora_a_out_copy), adapters, args->lora_a_out, dtype, call);
    add_copy(ARGUMENT(lora_b_out_copy), adapters, args->lora_b_out, dtype, call);
  }
  call->options.push_back({"weight_early", &args->weight_early});
  pack_weights(random, false, false, args, call);
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
  // A GPU rounds the elements of d_out, up to 4 in magnitude, to the dtype of x.
  if (requests_d_b_out) call->output(ARGUMENT(d_b_out), dtype, {s.E, s.D}).scale = 4.0;
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
  pack_weights(random, requests_d_w_in, requests_d_w_out, args, call);
}

}  // namespace anabranch::fuzz
