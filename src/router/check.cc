#include "router/check.h"

#include <climits>

#include "balance/check.h"
#include "core/tensor.h"
#include "router/quantile.h"

namespace anabranch {
namespace {

ab_status check_sizes(const ab_tensor* logits, int32_t topk) {
  AB_RETURN_IF_ERROR(check_tensor("logits", logits, kFloats, {{"T"}, {"E"}}));
  const int64_t T = logits->shape[0];
  const int64_t E = logits->shape[1];
  constexpr int64_t kMaxExperts = int64_t{1} << 30;  // an int holds the next power of two
  if (E > kMaxExperts) {
    return AB_INVALID("logits: got %lld experts, expected at most 2^30", static_cast<long long>(E));
  }
  if (topk < 1 || topk > E) {
    return AB_INVALID("topk: got %d, expected 1 <= topk <= %lld experts", topk, static_cast<long long>(E));
  }
  if (T > INT32_MAX / topk) {
    return AB_INVALID("logits: got %lld tokens with topk %d, expected fewer than 2^31 slots", static_cast<long long>(T),
                      topk);
  }
  return ok();
}

ab_status check_options(int32_t score_function, int32_t normalize, float scaling_factor) {
  if (score_function < AB_SOFTMAX || score_function > AB_SQRTSOFTPLUS) {
    return AB_INVALID("score_function: got %d, expected 0 (softmax), 1 (sigmoid) or 2 (sqrtsoftplus)", score_function);
  }
  if (normalize != 0 && normalize != 1) return AB_INVALID("normalize: got %d, expected 0 or 1", normalize);
  if (!__builtin_isfinite(scaling_factor)) {
    return AB_INVALID("scaling_factor: got %g, expected a finite number", static_cast<double>(scaling_factor));
  }
  return ok();
}

ab_status check_groups(int32_t num_groups, int32_t group_topk, int32_t group_score_topk, int32_t K, int64_t E) {
  if (num_groups == 0 && group_topk == 0) {
    if (group_score_topk == 0) return ok();
    return AB_INVALID("group_score_topk: got %d without groups, expected 0", group_score_topk);
  }
  if (num_groups < 1 || E % num_groups != 0) {
    return AB_INVALID("num_groups: got %d, expected a divisor of %lld experts (or 0, with group_topk 0: no groups)",
                      num_groups, static_cast<long long>(E));
  }
  const int64_t size = E / num_groups;
  if (group_score_topk != 0) {
    if (group_score_topk < 1 || group_score_topk > size) {
      return AB_INVALID("group_score_topk: got %d, expected 1 to the %lld experts of a group (or 0: topk / group_topk)",
                        group_score_topk, static_cast<long long>(size));
    }
    if (group_topk < 1 || group_topk > num_groups || K > group_topk * size) {
      return AB_INVALID(
          "group_topk: got %d, expected 1 <= group_topk <= num_groups %d, and groups of %lld experts that hold topk %d",
          group_topk, num_groups, static_cast<long long>(size), K);
    }
    return ok();
  }
  if (group_topk < 1 || group_topk > num_groups || K % group_topk != 0 || K / group_topk > size) {
    return AB_INVALID(
        "group_topk: got %d, expected 1 <= group_topk <= num_groups %d, a divisor of topk %d, and topk / group_topk at "
        "most the %lld experts of a group",
        group_topk, num_groups, K, static_cast<long long>(size));
  }
  return ok();
}

// Rejects an option that affects only the selection, in a call where no output depends on it.
ab_status refuse(const char* name, bool given, const char* reason) {
  return given ? AB_INVALID("%s: got one %s, expected none", name, reason) : ok();
}

ab_status check_bytes_or_bits(const ab_tensor* map, int64_t T, int64_t E, MapFormat* format) {
  if (map->dtype == AB_BOOL) {
    *format = MapFormat::bytes;
    return check_tensor("routing_map", map, kBool, {{"T", T}, {"E", E}});
  }
  *format = MapFormat::bits;
  return check_tensor("routing_map", map, dtype_bit(AB_UINT8), {{"T", T}, {"ceil(E/8)", (E + 7) / 8}});
}

ab_status check_map(const ab_tensor* map, int64_t T, int64_t E, int32_t K, MapFormat* format) {
  *format = MapFormat::none;
  if (map == nullptr) return ok();
  constexpr Dtypes kAny = kBool | dtype_bit(AB_UINT8) | kIndices;
  AB_RETURN_IF_ERROR(check_tensor("routing_map", map, kAny, {{"T", T}, {"E, ceil(E/8) or K"}}));
  if (map->dtype == AB_BOOL || map->dtype == AB_UINT8) return check_bytes_or_bits(map, T, E, format);
  *format = MapFormat::indices;
  AB_RETURN_IF_ERROR(check_tensor("routing_map", map, kIndices, {{"T", T}, {"K", K}}));
  if (map->dtype == AB_INT16 && E > 32768) {
    return AB_INVALID("routing_map: got int16 indices for %lld experts, expected at most 32768 experts or a wider type",
                      static_cast<long long>(E));
  }
  return ok();
}

ab_status check_quantile_balancing(const ab_router_forward_args* args, int64_t E) {
  if (args->qb_bin_bounds == nullptr && args->qb_histogram == nullptr) return ok();
  AB_RETURN_IF_ERROR(check_tensor("qb_bin_bounds", args->qb_bin_bounds, kFloat32, {{"2", 2}}));
  AB_RETURN_IF_ERROR(check_tensor("qb_histogram", args->qb_histogram, kInt32, {{"E", E}, {"bins"}}));
  const int64_t bins = args->qb_histogram->shape[1];
  if (bins < 1 || bins > kMaxBins) {
    return AB_INVALID("qb_histogram: got %lld bins, expected 1 to %lld", static_cast<long long>(bins),
                      static_cast<long long>(kMaxBins));
  }
  if (E * bins > INT32_MAX) {
    return AB_INVALID("qb_histogram: got %lld counts, expected fewer than 2^31", static_cast<long long>(E * bins));
  }
  if (args->expert_bias == nullptr) {
    return AB_INVALID("expert_bias: got NULL together with qb_histogram, expected a float dtype [E=%lld]",
                      static_cast<long long>(E));
  }
  if (args->topk >= E) {
    return AB_INVALID("topk: got %d together with qb_histogram, expected fewer than the %lld experts", args->topk,
                      static_cast<long long>(E));
  }
  return refuse("num_groups", args->num_groups != 0, "together with qb_histogram");
}

Cotangent cotangent(const ab_tensor* tensor) {
  return tensor == nullptr ? Cotangent{} : Cotangent{tensor->data, tensor->dtype};
}

}  // namespace

ab_status check_router_forward(const ab_router_forward_args* args, RouterForward* op) {
  AB_RETURN_IF_ERROR(check_sizes(args->logits, args->topk));
  AB_RETURN_IF_ERROR(check_options(args->score_function, args->normalize, args->scaling_factor));
  const int64_t T = args->logits->shape[0];
  const int64_t E = args->logits->shape[1];
  const int32_t K = args->topk;
  AB_RETURN_IF_ERROR(check_groups(args->num_groups, args->group_topk, args->group_score_topk, K, E));
  AB_RETURN_IF_ERROR(check_optional("expert_bias", args->expert_bias, kFloats, {{"E", E}}));
  AB_RETURN_IF_ERROR(check_optional("token_mask", args->token_mask, kBool, {{"T", T}}));
  AB_RETURN_IF_ERROR(check_optional("forced_experts", args->forced_experts, kInt32, {{"T", T}, {"K", K}}));
  AB_RETURN_IF_ERROR(check_optional("weights", args->weights, kFloat32, {{"T", T}, {"K", K}}));
  AB_RETURN_IF_ERROR(check_optional("experts", args->experts, kInt32, {{"T", T}, {"K", K}}));
  AB_RETURN_IF_ERROR(check_optional("lse", args->lse, kFloat32, {{"T", T}}));
  AB_RETURN_IF_ERROR(check_optional("probs", args->probs, dtype_bit(static_cast<ab_dtype>(args->logits->dtype)),
                                    {{"T", T}, {"E", E}}));
  AB_RETURN_IF_ERROR(check_map(args->routing_map, T, E, K, &op->map_format));
  AB_RETURN_IF_ERROR(check_optional("aux_scores", args->aux_scores, kFloat32, {{"T", T}, {"E", E}}));

  AB_RETURN_IF_ERROR(check_quantile_balancing(args, E));

  int64_t count_sequences = 1;
  int64_t sum_sequences = 1;
  const bool counts = args->tokens_per_expert != nullptr;
  const bool sums = args->score_sum != nullptr;
  if (counts) {
    AB_RETURN_IF_ERROR(check_statistics("tokens_per_expert", args->tokens_per_expert, kInt32, T, E, &count_sequences));
  }
  if (sums) AB_RETURN_IF_ERROR(check_statistics("score_sum", args->score_sum, kFloat32, T, E, &sum_sequences));
  if (counts && sums && count_sequences != sum_sequences) {
    return AB_INVALID("score_sum: got %lld sequences, expected the %lld of tokens_per_expert",
                      static_cast<long long>(sum_sequences), static_cast<long long>(count_sequences));
  }

  op->T = T;
  op->E = E;
  op->K = K;
  op->score_function = args->score_function;
  op->normalize = args->normalize != 0;
  op->num_groups = args->num_groups;
  op->group_topk = args->group_topk;
  const bool by_rule = args->group_score_topk == 0;
  op->group_score_topk = by_rule && args->group_topk > 0 ? K / args->group_topk : args->group_score_topk;
  op->groups_by_logits =
      by_rule && args->score_function == AB_SOFTMAX && args->normalize != 0 && args->expert_bias == nullptr;
  op->scaling_factor = args->scaling_factor;
  op->logits = data<const void>(args->logits);
  op->logits_dtype = args->logits->dtype;
  op->bias = data<const void>(args->expert_bias);
  op->bias_dtype = args->expert_bias == nullptr ? 0 : args->expert_bias->dtype;
  op->token_mask = data<const uint8_t>(args->token_mask);
  op->forced_experts = data<const int32_t>(args->forced_experts);
  op->needs_weights = args->weights != nullptr || args->probs != nullptr;
  op->needs_selection = op->needs_weights || args->experts != nullptr || counts || args->routing_map != nullptr ||
                        args->qb_histogram != nullptr;
  op->forced = args->forced_experts != nullptr;
  op->weights = data<float>(args->weights);
  op->experts = data<int32_t>(args->experts);
  op->tokens_per_expert = data<int32_t>(args->tokens_per_expert);
  op->score_sum = data<float>(args->score_sum);
  op->lse = data<float>(args->lse);
  op->probs = data<void>(args->probs);
  op->routing_map = data<void>(args->routing_map);
  op->map_dtype = args->routing_map == nullptr ? 0 : args->routing_map->dtype;
  op->aux_scores = data<float>(args->aux_scores);
  op->blocks = TokenBlocks(T, counts ? count_sequences : sum_sequences);
  op->qb_bin_bounds = data<const float>(args->qb_bin_bounds);
  op->qb_histogram = data<int32_t>(args->qb_histogram);
  op->qb_bins = args->qb_histogram == nullptr ? 0 : args->qb_histogram->shape[1];

  if (op->forced) {
    constexpr const char* kReason = "together with forced_experts";
    AB_RETURN_IF_ERROR(refuse("expert_bias", args->expert_bias != nullptr, kReason));
    AB_RETURN_IF_ERROR(refuse("num_groups", args->num_groups != 0, kReason));
    AB_RETURN_IF_ERROR(refuse("probs", args->probs != nullptr, kReason));
    AB_RETURN_IF_ERROR(refuse("routing_map", args->routing_map != nullptr, kReason));
    AB_RETURN_IF_ERROR(refuse("aux_scores", args->aux_scores != nullptr, kReason));
  }
  if (!op->needs_selection) {
    constexpr const char* kReason = "in a call without an output of the selection";
    AB_RETURN_IF_ERROR(refuse("expert_bias", args->expert_bias != nullptr, kReason));
    AB_RETURN_IF_ERROR(refuse("num_groups", args->num_groups != 0, kReason));
    AB_RETURN_IF_ERROR(refuse("forced_experts", op->forced, kReason));
  }
  if (!op->needs_weights && args->scaling_factor != 1.0f) {
    return AB_INVALID("scaling_factor: got %g in a call without weights or probs, expected 1",
                      static_cast<double>(args->scaling_factor));
  }
  return ok();
}

ab_status check_router_backward(const ab_router_backward_args* args, RouterBackward* op) {
  AB_RETURN_IF_ERROR(check_sizes(args->logits, args->topk));
  AB_RETURN_IF_ERROR(check_options(args->score_function, args->normalize, args->scaling_factor));
  const int64_t T = args->logits->shape[0];
  const int64_t E = args->logits->shape[1];
  const int32_t K = args->topk;
  AB_RETURN_IF_ERROR(check_optional("experts", args->experts, kIndices, {{"T", T}, {"K", K}}));
  if (args->routing_map != nullptr) {
    constexpr Dtypes kMaps = kBool | dtype_bit(AB_UINT8);
    AB_RETURN_IF_ERROR(check_tensor("routing_map", args->routing_map, kMaps, {{"T", T}, {"E or ceil(E/8)"}}));
    AB_RETURN_IF_ERROR(check_bytes_or_bits(args->routing_map, T, E, &op->selection.format));
  }
  AB_RETURN_IF_ERROR(check_optional("token_mask", args->token_mask, kBool, {{"T", T}}));
  AB_RETURN_IF_ERROR(check_optional("lse", args->lse, kFloat32, {{"T", T}}));
  AB_RETURN_IF_ERROR(check_optional("d_weights", args->d_weights, kFloats, {{"T", T}, {"K", K}}));
  AB_RETURN_IF_ERROR(check_optional("d_probs", args->d_probs, kFloats, {{"T", T}, {"E", E}}));
  AB_RETURN_IF_ERROR(check_optional("d_aux_scores", args->d_aux_scores, kFloats, {{"T", T}, {"E", E}}));
  AB_RETURN_IF_ERROR(check_optional("d_lse", args->d_lse, kFloats, {{"T", T}}));
  int64_t sequences = 1;
  if (args->d_score_sum != nullptr) {
    AB_RETURN_IF_ERROR(check_statistics("d_score_sum", args->d_score_sum, kFloats, T, E, &sequences));
  }
  const Dtypes d_logits_dtypes =
      args->logits->dtype == AB_FLOAT32 ? kFloats : dtype_bit(static_cast<ab_dtype>(args->logits->dtype));
  AB_RETURN_IF_ERROR(check_tensor("d_logits", args->d_logits, d_logits_dtypes, {{"T", T}, {"E", E}}));

  const bool weighted = args->d_weights != nullptr || args->d_probs != nullptr;
  AB_RETURN_IF_ERROR(
      refuse("d_probs", args->d_probs != nullptr && args->d_weights != nullptr, "together with d_weights"));
  AB_RETURN_IF_ERROR(refuse("d_aux_scores", args->d_aux_scores != nullptr && args->d_score_sum != nullptr,
                            "together with d_score_sum"));
  AB_RETURN_IF_ERROR(
      refuse("routing_map", args->routing_map != nullptr && args->experts != nullptr, "together with experts"));
  AB_RETURN_IF_ERROR(
      refuse("routing_map", args->routing_map != nullptr && args->d_probs == nullptr, "in a call without d_probs"));
  if (weighted && args->experts == nullptr && args->routing_map == nullptr) {
    return AB_INVALID("experts: got NULL together with %s, expected indices [T=%lld, K=%d]%s",
                      args->d_weights != nullptr ? "d_weights" : "d_probs", static_cast<long long>(T), K,
                      args->d_weights != nullptr ? "" : ", or a routing_map");
  }
  if (!weighted) {
    constexpr const char* kReason = "in a call without d_weights or d_probs";
    AB_RETURN_IF_ERROR(refuse("experts", args->experts != nullptr, kReason));
    if (args->scaling_factor != 1.0f) {
      return AB_INVALID("scaling_factor: got %g %s, expected 1", static_cast<double>(args->scaling_factor), kReason);
    }
  }
  const bool auxiliary = args->d_score_sum != nullptr || args->d_aux_scores != nullptr;
  if (args->lse != nullptr && args->d_lse == nullptr &&
      (args->score_function != AB_SOFTMAX || !(weighted || auxiliary))) {
    return AB_INVALID("lse: got one in a call without a softmax, expected none");
  }

  op->T = T;
  op->E = E;
  op->K = K;
  op->score_function = args->score_function;
  op->normalize = args->normalize != 0;
  op->scaling_factor = args->scaling_factor;
  op->logits = data<const void>(args->logits);
  op->logits_dtype = args->logits->dtype;
  const ab_tensor* selection = args->routing_map != nullptr ? args->routing_map : args->experts;
  op->selection.data = data<const void>(selection);
  op->selection.dtype = selection == nullptr ? 0 : selection->dtype;
  if (op->selection.format == MapFormat::indices && op->selection.dtype == AB_INT32) {
    op->experts = data<const int32_t>(selection);
  }
  op->token_mask = data<const uint8_t>(args->token_mask);
  op->lse = data<const float>(args->lse);
  op->d_weights = cotangent(args->d_weights);
  op->d_probs = cotangent(args->d_probs);
  op->d_score_sum = cotangent(args->d_score_sum);
  op->d_aux_scores = cotangent(args->d_aux_scores);
  op->d_lse = cotangent(args->d_lse);
  op->weighted = weighted;
  op->auxiliary = auxiliary;
  op->softmax_rows = args->d_lse != nullptr ||
                     (args->score_function == AB_SOFTMAX && (auxiliary || (weighted && args->normalize == 0)));
  op->d_logits = data<void>(args->d_logits);
  op->d_logits_dtype = args->d_logits->dtype;
  op->blocks = TokenBlocks(T, sequences);
  return ok();
}

}  // namespace anabranch
