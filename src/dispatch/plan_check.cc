#include "dispatch/plan.h"

namespace anabranch {
namespace {

ab_status check_slots(const ab_plan_args* args, PlanCall* call) {
  if ((args->experts == nullptr) == (args->routing_map == nullptr)) {
    return AB_INVALID("experts: got %s, expected either experts or routing_map",
                      args->experts == nullptr ? "neither it nor routing_map" : "it and routing_map");
  }
  const int64_t E = call->E;
  Maps& maps = call->maps;
  if (args->experts != nullptr) {
    AB_RETURN_IF_ERROR(check_tensor("experts", args->experts, kIndices, {{"T"}, {"K"}}));
    call->format = SlotFormat::experts;
    call->slots = data<const void>(args->experts);
    call->index_dtype = args->experts->dtype;
    maps.T = args->experts->shape[0];
    maps.K = args->experts->shape[1];
    if (maps.K < 1) return AB_INVALID("experts: got K 0, expected at least 1 expert per token");
    if (args->row_id_map != nullptr) {
      return AB_INVALID("row_id_map: got one together with experts, expected routing_map instead of experts");
    }
    return check_num_slots("experts", maps.T, maps.K);
  }
  constexpr Dtypes kMaps = kBool | dtype_bit(AB_UINT8);
  AB_RETURN_IF_ERROR(check_tensor("routing_map", args->routing_map, kMaps, {{"T"}, {"E or ceil(E/8)"}}));
  const bool bits = args->routing_map->dtype == AB_UINT8;
  AB_RETURN_IF_ERROR(bits ? check_tensor("routing_map", args->routing_map, kMaps, {{"T"}, {"ceil(E/8)", (E + 7) / 8}})
                          : check_tensor("routing_map", args->routing_map, kMaps, {{"T"}, {"E", E}}));
  call->format = bits ? SlotFormat::bit_map : SlotFormat::byte_map;
  call->slots = data<const void>(args->routing_map);
  maps.T = args->routing_map->shape[0];
  maps.K = E;
  return check_num_slots("routing_map", maps.T, E);
}

}  // namespace

ab_status check_plan(const ab_plan_args* args, PlanCall* call) {
  if (args->num_experts < 1) return AB_INVALID("num_experts: got %d, expected at least 1", args->num_experts);
  if (args->align_size < 0) return AB_INVALID("align_size: got %d, expected at least 0", args->align_size);
  if (args->is_part != 0 && args->is_part != 1) return AB_INVALID("is_part: got %d, expected 0 or 1", args->is_part);
  if (args->first_expert < 0 || (args->is_part == 0 && args->first_expert != 0)) {
    return AB_INVALID("first_expert: got %d, expected %s", args->first_expert,
                      args->is_part == 0 ? "0 without is_part" : "0 or more");
  }
  if (args->is_part == 1 && args->experts == nullptr) {
    return AB_INVALID("is_part: got 1 with routing_map, expected experts");
  }
  call->is_part = args->is_part == 1;
  call->first_expert = args->first_expert;
  const int64_t E = call->E = args->num_experts;
  const int64_t destinations = args->num_destinations == 0 ? 1 : args->num_destinations;
  if (destinations < 0 || E % destinations != 0) {
    return AB_INVALID("num_destinations: got %d, expected a divisor of %d experts", args->num_destinations,
                      args->num_experts);
  }
  Maps& maps = call->maps;
  AB_RETURN_IF_ERROR(check_slots(args, call));
  AB_RETURN_IF_ERROR(check_optional("tokens_per_expert", args->tokens_per_expert, kInt32, {{"E", E}}));
  AB_RETURN_IF_ERROR(check_optional("group_sizes", args->group_sizes, kInt32, {{"E", E}}));
  AB_RETURN_IF_ERROR(check_optional("offsets", args->offsets, kInt32, {{"E+1", E + 1}}));
  if (args->dropped != nullptr && args->dropped->rank == 1) {
    call->num_dropped = args->dropped->shape[0];
    if (call->num_dropped < 1) return AB_INVALID("dropped: got [0], expected a scalar or [n] with n >= 1");
    AB_RETURN_IF_ERROR(check_optional("dropped", args->dropped, kInt32, {{"n", call->num_dropped}}));
  } else {
    AB_RETURN_IF_ERROR(check_optional("dropped", args->dropped, kInt32, {}));
  }
  AB_RETURN_IF_ERROR(check_optional("row_id_map", args->row_id_map, kInt32, {{"T", maps.T}, {"2E+1", 2 * E + 1}}));
  if (args->row_of_slot != nullptr) {
    AB_RETURN_IF_ERROR(check_row_of_slot(args->row_of_slot, maps.T, {"K", maps.K}, &maps));
  }
  AB_RETURN_IF_ERROR(check_slot_of_row(args->slot_of_row, &maps));
  Regions& regions = call->regions;
  regions.align = args->align_size > 1 ? args->align_size : 1;
  if (maps.R % (regions.align * destinations) != 0) {
    return AB_INVALID("slot_of_row: got %lld rows, expected a multiple of align_size %lld%s",
                      static_cast<long long>(maps.R), static_cast<long long>(regions.align),
                      destinations > 1 ? " for each destination" : "");
  }
  regions.experts = E / destinations;
  regions.rows = maps.R / destinations;
  call->tokens_per_expert = data<int32_t>(args->tokens_per_expert);
  call->group_sizes = data<int32_t>(args->group_sizes);
  call->offsets = data<int32_t>(args->offsets);
  call->dropped = data<int32_t>(args->dropped);
  call->row_id_map = data<int32_t>(args->row_id_map);
  return ok();
}

}  // namespace anabranch
