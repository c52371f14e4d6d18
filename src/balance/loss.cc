#include "anabranch/balance.h"
#include "core/tensor.h"

using namespace anabranch;

extern "C" ab_status ab_load_balance_loss(const ab_load_balance_loss_args* args, const ab_exec*) {
  AB_RETURN_IF_ERROR(check_struct("ab_load_balance_loss_args", args, args == nullptr ? 0 : args->size, sizeof(*args)));
  if (args->topk < 1) return AB_INVALID("topk: got %d, expected at least 1", args->topk);
  if (!__builtin_isfinite(args->coeff)) return AB_INVALID("coeff: got %g, expected a finite number", args->coeff);
  const bool by_sequence = args->score_sum != nullptr && args->score_sum->rank == 2;
  const int64_t B = by_sequence ? args->score_sum->shape[0] : 1;
  if (by_sequence) {
    AB_RETURN_IF_ERROR(check_tensor("score_sum", args->score_sum, kFloat32, {{"B"}, {"E"}}));
    const int64_t E = args->score_sum->shape[1];
    AB_RETURN_IF_ERROR(check_tensor("tokens_per_expert", args->tokens_per_expert, kInt32, {{"B", B}, {"E", E}}));
    AB_RETURN_IF_ERROR(check_tensor("num_tokens", args->num_tokens, kInt32, {{"B", B}}));
    AB_RETURN_IF_ERROR(check_optional("d_score_sum", args->d_score_sum, kFloat32, {{"B", B}, {"E", E}}));
  } else {
    AB_RETURN_IF_ERROR(check_tensor("score_sum", args->score_sum, kFloat32, {{"E"}}));
    const int64_t E = args->score_sum->shape[0];
    AB_RETURN_IF_ERROR(check_tensor("tokens_per_expert", args->tokens_per_expert, kInt32, {{"E", E}}));
    AB_RETURN_IF_ERROR(check_tensor("num_tokens", args->num_tokens, kInt32, {}));
    AB_RETURN_IF_ERROR(check_optional("d_score_sum", args->d_score_sum, kFloat32, {{"E", E}}));
  }
  AB_RETURN_IF_ERROR(check_optional("loss", args->loss, kFloat32, {}));

  const int64_t E = args->score_sum->shape[by_sequence ? 1 : 0];
  const float* score_sum = data<const float>(args->score_sum);
  const int32_t* counts = data<const int32_t>(args->tokens_per_expert);
  double loss = 0.0;
  for (int64_t b = 0; b < B; ++b) {
    const double N = data<const int32_t>(args->num_tokens)[b];
    // d loss / d score_sum[b, e] = factor * counts[b, e]
    const double factor = N > 0 ? static_cast<double>(args->coeff) * static_cast<double>(E) /
                                      (args->topk * N * N * static_cast<double>(B))
                                : 0.0;
    for (int64_t e = 0; e < E; ++e) {
      const double gradient = factor * counts[b * E + e];
      if (N > 0) loss += gradient * score_sum[b * E + e];
      if (args->d_score_sum != nullptr) data<float>(args->d_score_sum)[b * E + e] = static_cast<float>(gradient);
    }
  }
  if (args->loss != nullptr) *data<float>(args->loss) = static_cast<float>(loss);
  return ok();
}
