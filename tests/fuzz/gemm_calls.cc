// Random valid calls of grouped GEMMs and of quantisation.
#include "expert_calls.h"

namespace anabranch::fuzz {

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

namespace {

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

}  // namespace

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
  Random packing = random;
  if (args->precision != AB_PRECISION_FP8 && packs_a_weight(packing)) {
    pack_weight(ARGUMENT(w_block_scales), packing, false, {0, 1, 2}, args->w, call);
  }
  call->options = {{"transpose_w", &args->transpose_w}, {"weight_early", &args->weight_early},
                   {"skip_rest", &args->skip_rest},     {"backward", &args->backward},
                   {"precision", &args->precision},     {"fp8_scales", &args->fp8_scales}};
}

}  // namespace anabranch::fuzz
