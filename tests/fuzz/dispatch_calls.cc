// Random valid calls that plan and move rows.
#include "anabranch/dispatch.h"
#include "calls.h"

namespace anabranch::fuzz {

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
    call->input(ARGUMENT(experts), random.one_of<int32_t>({AB_INT16, AB_INT32, AB_INT32, AB_INT64}), {T, K}, s.E);
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

}  // namespace anabranch::fuzz
