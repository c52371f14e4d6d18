// Structs of the C interface as callers bring them: compiled against an older header, which knows fewer fields, or a
// newer one, which knows more.
#pragma once

#include <cstddef>
#include <type_traits>

#include "anabranch/balance.h"
#include "anabranch/dispatch.h"
#include "anabranch/experts.h"
#include "anabranch/router.h"
#include "core/status.h"

namespace anabranch {

// Products with a number of threads stay far from the end of int.
constexpr int kMostThreads = 4096;

// A struct's name, and its size in version 0.1.0, up to the field that was its last then. Fields that came later stand
// behind it, and 0 means that they are not given.
template <class Struct>
struct StructOf;

#define AB_STRUCT(type, last_field)                                                                    \
  template <>                                                                                          \
  struct StructOf<type> {                                                                              \
    static constexpr const char* kName = #type;                                                        \
    static constexpr size_t kOldest = offsetof(type, last_field) + sizeof(decltype(type::last_field)); \
  }

AB_STRUCT(ab_exec, workspace_size);
AB_STRUCT(ab_router_forward_args, aux_scores);
AB_STRUCT(ab_router_backward_args, d_logits);
AB_STRUCT(ab_load_balance_loss_args, d_score_sum);
AB_STRUCT(ab_score_sum_args, score_sum);
AB_STRUCT(ab_moe_aux_loss_args, d_probs);
AB_STRUCT(ab_plan_args, row_id_map);
AB_STRUCT(ab_dispatch_args, rows);
AB_STRUCT(ab_combine_args, addend);
AB_STRUCT(ab_combine_backward_args, d_weights);
AB_STRUCT(ab_sort_chunks_args, row_id_map);
AB_STRUCT(ab_expand_row_id_map_args, slot_of_row);
AB_STRUCT(ab_quantize_rows_args, scales);
AB_STRUCT(ab_quantize_weights_args, scales);
AB_STRUCT(ab_grouped_matmul_args, y);
AB_STRUCT(ab_grouped_matmul_dw_args, d_w);
AB_STRUCT(ab_grouped_matmul_combine_args, out);
AB_STRUCT(ab_expert_ffn_forward_args, a);
AB_STRUCT(ab_expert_ffn_backward_args, weighted_a);

#undef AB_STRUCT

// Copies `given`, whose first field says its size, to the `known` bytes at `to`: what an older struct lacks becomes 0,
// and what a newer one has more must be 0. At least `oldest` bytes must be there.
ab_status take_struct(const char* name, const void* given, size_t oldest, size_t known, void* to);

template <class Struct>
ab_status take_struct(const Struct* given, Struct* to) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  return take_struct(StructOf<Struct>::kName, given, StructOf<Struct>::kOldest, sizeof(Struct), to);
}

// The same of an ab_exec, whose number of threads must be one that a machine may have; NULL stands for the defaults.
ab_status take_exec(const ab_exec* given, ab_exec* to);

}  // namespace anabranch
