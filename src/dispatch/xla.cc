#include "core/xla.h"
#include "anabranch/dispatch.h"

namespace {

using anabranch::xla::Field;

constexpr Field kDispatchFields[] = {
    AB_TENSOR(ab_dispatch_args, x),           AB_TENSOR(ab_dispatch_args, row_of_slot),
    AB_TENSOR(ab_dispatch_args, slot_of_row), AB_TENSOR(ab_dispatch_args, weights),
    AB_TENSOR(ab_dispatch_args, rows),
};

constexpr Field kCombineFields[] = {
    AB_TENSOR(ab_combine_args, rows), AB_TENSOR(ab_combine_args, row_of_slot), AB_TENSOR(ab_combine_args, weights),
    AB_TENSOR(ab_combine_args, out),  AB_TENSOR(ab_combine_args, addend),
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

AB_XLA_HANDLER(dispatch, kDispatchFields, nullptr);
AB_XLA_HANDLER(combine, kCombineFields, ab_combine_workspace);
AB_XLA_HANDLER(combine_backward, kCombineBackwardFields, nullptr);
AB_XLA_HANDLER(sort_chunks, kSortChunksFields, ab_sort_chunks_workspace);
AB_XLA_HANDLER(expand_row_id_map, kExpandRowIdMapFields, nullptr);
