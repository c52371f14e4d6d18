// Accepts structs of the C interface that were compiled against an older header, with fewer fields, or a newer one,
// with more.
#pragma once

#include <cstddef>
#include <span>
#include <type_traits>

#include "anabranch/balance.h"
#include "anabranch/dispatch.h"
#include "anabranch/exchange.h"
#include "anabranch/experts.h"
#include "anabranch/router.h"
#include "core/status.h"

namespace anabranch {

// Multiples of the number of threads stay far below the maximum of int.
constexpr int kMaxThreads = 4096;

// The name of a struct, and its sizes in the headers that callers may have been compiled against: the released
// versions, oldest first, then the current one. Fields are only appended. Fields that an older struct lacks are 0,
// which means "not given".
template <class Struct>
struct StructOf;

#define AB_END_OF(type, field) (offsetof(type, field) + sizeof(decltype(type::field)))

// Names the last field in version 0.1.0 (for a later struct: in its first release) and the current last field. A struct
// must end with its last field: older callers would leave padding after it uninitialised, so no later field may use it.
#define AB_STRUCT(type, last_field_0_1_0, last_field)                                                              \
  template <>                                                                                                      \
  struct StructOf<type> {                                                                                          \
    static constexpr const char* kName = #type;                                                                    \
    static constexpr size_t kSizes[] = {AB_END_OF(type, last_field_0_1_0), sizeof(type)};                          \
    static_assert(kSizes[0] % alignof(type) == 0, #type " of version 0.1.0 ends in padding");                      \
    static_assert(AB_END_OF(type, last_field) == sizeof(type), #type " ends in padding or in another last field"); \
  }

AB_STRUCT(ab_exec, workspace_size, workspace_size);
AB_STRUCT(ab_router_forward_args, aux_scores, qb_histogram);
AB_STRUCT(ab_router_backward_args, d_logits, routing_map);
AB_STRUCT(ab_load_balance_loss_args, d_score_sum, d_score_sum);
AB_STRUCT(ab_score_sum_args, score_sum, score_sum);
AB_STRUCT(ab_moe_aux_loss_args, d_probs, d_probs);
AB_STRUCT(ab_plan_args, row_id_map, first_expert);
AB_STRUCT(ab_dispatch_args, rows, rows);
AB_STRUCT(ab_combine_args, addend, addend);
AB_STRUCT(ab_combine_backward_args, d_weights, d_weights);
AB_STRUCT(ab_sort_chunks_args, row_id_map, row_id_map);
AB_STRUCT(ab_expand_row_id_map_args, slot_of_row, slot_of_row);
AB_STRUCT(ab_quantize_rows_args, scales, scales);
AB_STRUCT(ab_quantize_weights_args, scales, scales);
AB_STRUCT(ab_pack_mxfp4_args, scales, scales);
AB_STRUCT(ab_unpack_args, w, w);
AB_STRUCT(ab_grouped_matmul_args, y, lora_u);
AB_STRUCT(ab_grouped_matmul_dw_args, d_w, reserved);
AB_STRUCT(ab_grouped_matmul_combine_args, out, returning_reserved);
AB_STRUCT(ab_expert_ffn_forward_args, a, arriving_reserved);
AB_STRUCT(ab_expert_ffn_backward_args, weighted_a, arriving_reserved);
AB_STRUCT(ab_exchange_create_args, buffer_bytes, buffer_bytes);
AB_STRUCT(ab_exchange_all_gather_args, out, out_3);
AB_STRUCT(ab_exchange_all_to_all_args, out, out);
AB_STRUCT(ab_exchange_release_args, reserved, reserved);
AB_STRUCT(ab_exchange_sum_args, out, out);

#undef AB_END_OF
#undef AB_STRUCT

// Copies `given`, whose first field is its size, to the struct at `to`, whose size is the last of `sizes`. Accepts
// other sizes, too: released ones, whose missing fields become 0, and larger multiples of 8 up to 4096 whose extra
// bytes are 0.
ab_status take_struct(const char* name, const void* given, std::span<const size_t> sizes, void* to);

template <class Struct>
ab_status take_struct(const Struct* given, Struct* to) {
  static_assert(std::is_trivially_copyable_v<Struct>, "args structs are copied as bytes");
  return take_struct(StructOf<Struct>::kName, given, StructOf<Struct>::kSizes, to);
}

// Copies an ab_exec and checks that its number of threads is in range; NULL means the defaults.
ab_status take_exec(const ab_exec* given, ab_exec* to);

}  // namespace anabranch
