#include "core/xla.h"
#include "anabranch/dispatch.h"

namespace {

using anabranch::xla::Field;

constexpr Field kPlanFields[] = {
    AB_INT32(ab_plan_args, num_experts),        AB_INT32(ab_plan_args, align_size),
    AB_TENSOR(ab_plan_args, experts),           AB_TENSOR(ab_plan_args, routing_map),
    AB_TENSOR(ab_plan_args, tokens_per_expert), AB_TENSOR(ab_plan_args, group_sizes),
    AB_TENSOR(ab_plan_args, offsets),           AB_TENSOR(ab_plan_args, row_of_slot),
    AB_TENSOR(ab_plan_args, slot_of_row),       AB_TENSOR(ab_plan_args, dropped),
    AB_TENSOR(ab_plan_args, row_id_map),
};

constexpr Field kDispatchFields[] = {
    AB_TENSOR(ab_dispatch_args, x),           AB_TENSOR(ab_dispatch_args, row_of_slot),
    AB_TENSOR(ab_dispatch_args, slot_of_row), AB_TENSOR(ab_dispatch_args, weights),
    AB_TENSOR(ab_dispatch_args, rows),
};

constexpr Field kCombineFields[] = {
    AB_TENSOR(ab_combine_args, rows),
    AB_TENSOR(ab_combine_args, row_of_slot),
    AB_TENSOR(ab_combine_args, weights),
    AB_TENSOR(ab_combine_args, out),
};

constexpr Field kCombineBackwardFields[] = {
    AB_TENSOR(ab_combine_backward_args, d_out),       AB_TENSOR(ab_combine_backward_args, rows),
    AB_TENSOR(ab_combine_backward_args, row_of_slot), AB_TENSOR(ab_combine_backward_args, slot_of_row),
    AB_TENSOR(ab_combine_backward_args, weights),     AB_TENSOR(ab_combine_backward_args, d_rows),
    AB_TENSOR(ab_combine_backward_args, d_weights),
};

constexpr Field kSortChunksFields[] = {
    AB_INT32(ab_sort_chunks_args, inverse),      AB_TENSOR(ab_sort_chunks_args, x),
    AB_TENSOR(ab_sort_chunks_args, split_sizes), AB_TENSOR(ab_sort_chunks_args, sorted_indices),
    AB_TENSOR(ab_sort_chunks_args, out),         AB_TENSOR(ab_sort_chunks_args, row_id_map),
};

constexpr Field kExpandRowIdMapFields[] = {
    AB_TENSOR(ab_expand_row_id_map_args, row_id_map),
    AB_TENSOR(ab_expand_row_id_map_args, pad_offsets),
    AB_TENSOR(ab_expand_row_id_map_args, row_of_slot),
    AB_TENSOR(ab_expand_row_id_map_args, slot_of_row),
};

}  // namespace

AB_XLA_HANDLER(ab_xla_plan, kPlanFields, ab_plan, ab_plan_workspace);
AB_XLA_HANDLER(ab_xla_dispatch, kDispatchFields, ab_dispatch, nullptr);
AB_XLA_HANDLER(ab_xla_combine, kCombineFields, ab_combine, ab_combine_workspace);
AB_XLA_HANDLER(ab_xla_combine_backward, kCombineBackwardFields, ab_combine_backward, nullptr);
AB_XLA_HANDLER(ab_xla_sort_chunks, kSortChunksFields, ab_sort_chunks, ab_sort_chunks_workspace);
AB_XLA_HANDLER(ab_xla_expand_row_id_map, kExpandRowIdMapFields, ab_expand_row_id_map, nullptr);
