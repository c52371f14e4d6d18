#include "balance/check.h"

#include <algorithm>

#include "balance/loss.h"

namespace anabranch {

ab_status check_statistics(const char* name, const ab_tensor* tensor, Dtypes dtypes, int64_t T, int64_t E,
                           int64_t* sequences) {
  *sequences = 1;
  if (tensor == nullptr || tensor->rank != 2) return check_tensor(name, tensor, dtypes, {{"E", E}});
  AB_RETURN_IF_ERROR(check_tensor(name, tensor, dtypes, {{"B"}, {"E", E}}));
  const int64_t B = tensor->shape[0];
  if (B == 0 ? T != 0 : T % B != 0) {
    return AB_INVALID("%s: got %lld sequences for %lld tokens, expected a divisor of the number of tokens", name,
                      static_cast<long long>(B), static_cast<long long>(T));
  }
  *sequences = B;
  return ok();
}

namespace {

constexpr Dtypes kCounts = dtype_bit(AB_UINT8) | kIndices | kFloats;
constexpr Dtypes kTotals = kInt32 | dtype_bit(AB_INT64);

ab_status check_loss_options(int32_t topk, float coeff) {
  if (topk < 1) return AB_INVALID("topk: got %d, expected at least 1", topk);
  if (!__builtin_isfinite(coeff)) {
    return AB_INVALID("coeff: got %g, expected a finite number", static_cast<double>(coeff));
  }
  return ok();
}

Counts counts(const ab_tensor* tensor) { return tensor == nullptr ? Counts{} : Counts{tensor->data, tensor->dtype}; }

}  // namespace

ab_status check_load_balance_loss(const ab_load_balance_loss_args* args, LoadBalanceLoss* op) {
  AB_RETURN_IF_ERROR(check_loss_options(args->topk, args->coeff));
  const bool by_sequence = args->score_sum != nullptr && args->score_sum->rank == 2;
  if (by_sequence) {
    AB_RETURN_IF_ERROR(check_tensor("score_sum", args->score_sum, kFloat32, {{"B"}, {"E"}}));
    const int64_t B = op->B = args->score_sum->shape[0];
    const int64_t E = op->E = args->score_sum->shape[1];
    AB_RETURN_IF_ERROR(check_tensor("tokens_per_expert", args->tokens_per_expert, kCounts, {{"B", B}, {"E", E}}));
    AB_RETURN_IF_ERROR(check_tensor("num_tokens", args->num_tokens, kTotals, {{"B", B}}));
    AB_RETURN_IF_ERROR(check_optional("d_score_sum", args->d_score_sum, kFloat32, {{"B", B}, {"E", E}}));
  } else {
    AB_RETURN_IF_ERROR(check_tensor("score_sum", args->score_sum, kFloat32, {{"E"}}));
    const int64_t E = op->E = args->score_sum->shape[0];
    AB_RETURN_IF_ERROR(check_tensor("tokens_per_expert", args->tokens_per_expert, kCounts, {{"E", E}}));
    AB_RETURN_IF_ERROR(check_tensor("num_tokens", args->num_tokens, kTotals, {}));
    AB_RETURN_IF_ERROR(check_optional("d_score_sum", args->d_score_sum, kFloat32, {{"E", E}}));
  }
  AB_RETURN_IF_ERROR(check_optional("loss", args->loss, kFloat32, {}));
  const double sequences = op->B > 0 ? static_cast<double>(op->B) : 1.0;
  op->coeff_per_topk = static_cast<double>(args->coeff) * static_cast<double>(op->E) / (args->topk * sequences);
  op->score_sum = data<const float>(args->score_sum);
  op->tokens_per_expert = counts(args->tokens_per_expert);
  op->num_tokens = counts(args->num_tokens);
  op->loss = data<float>(args->loss);
  op->d_score_sum = data<float>(args->d_score_sum);
  return ok();
}

ab_status check_moe_aux_loss(const ab_moe_aux_loss_args* args, MoeAuxLoss* op) {
  AB_RETURN_IF_ERROR(check_loss_options(args->topk, args->coeff));
  AB_RETURN_IF_ERROR(check_optional("probs", args->probs, kFloats, {{"T"}, {"C"}}));
  AB_RETURN_IF_ERROR(check_optional("d_probs", args->d_probs, kFloats, {{"T"}, {"C"}}));
  const ab_tensor* const dense = args->probs != nullptr ? args->probs : args->d_probs;
  if (dense == nullptr || (args->loss != nullptr && args->probs == nullptr)) {
    return AB_INVALID("probs: got NULL in a call for the loss, expected a float dtype [T, C]");
  }
  if (args->loss == nullptr && args->d_probs == nullptr) {
    return AB_INVALID("loss: got NULL without d_probs, expected one of them");
  }
  const int64_t T = op->T = dense->shape[0];
  const int64_t C = op->C = dense->shape[1];
  AB_RETURN_IF_ERROR(check_optional("d_probs", args->d_probs, kFloats, {{"T", T}, {"C", C}}));
  AB_RETURN_IF_ERROR(check_tensor("tokens_per_expert", args->tokens_per_expert, kCounts, {{"C", C}}));
  AB_RETURN_IF_ERROR(check_optional("num_tokens", args->num_tokens, kTotals, {}));
  AB_RETURN_IF_ERROR(check_optional("d_loss", args->d_loss, kFloats, {}));
  AB_RETURN_IF_ERROR(check_optional("loss", args->loss, kFloat32, {}));
  if (args->d_loss != nullptr && args->d_probs == nullptr) {
    return AB_INVALID("d_loss: got one in a call without d_probs, expected none");
  }
  const int64_t E = args->num_experts == 0 ? C : args->num_experts;
  if (args->num_experts < 0 || (E > 0 && C % E != 0)) {
    return AB_INVALID("num_experts: got %d, expected a divisor of the %lld columns of probs (or 0: all of them)",
                      args->num_experts, static_cast<long long>(C));
  }
  op->column_loss.E = C;
  op->column_loss.coeff_per_topk = static_cast<double>(args->coeff) * static_cast<double>(E) / args->topk;
  op->column_loss.tokens_per_expert = counts(args->tokens_per_expert);
  op->column_loss.num_tokens = counts(args->num_tokens);
  op->column_loss.T = T;
  op->probs = data<const void>(args->probs);
  op->probs_dtype = args->probs == nullptr ? 0 : args->probs->dtype;
  op->d_loss = counts(args->d_loss);
  op->loss = data<float>(args->loss);
  op->d_probs = data<void>(args->d_probs);
  op->d_probs_dtype = args->d_probs == nullptr ? 0 : args->d_probs->dtype;
  return ok();
}

namespace {

// sum[b, e] = sum over the blocks of sequence b, in order, of partial[block, e]. Processes a strip of columns at a
// time.
template <class Total, class T>
void add_blocks(const T* partial, const TokenBlocks& blocks, int64_t E, T* sum) {
  constexpr int64_t kStrip = 64;
  for (int64_t b = 0; b < blocks.sequences; ++b) {
    const T* first = partial + b * blocks.blocks_per_sequence * E;
    for (int64_t begin = 0; begin < E; begin += kStrip) {
      const int64_t width = std::min(kStrip, E - begin);
      Total total[kStrip] = {};
      for (int64_t i = 0; i < blocks.blocks_per_sequence; ++i) {
        for (int64_t e = 0; e < width; ++e) total[e] += static_cast<Total>(first[i * E + begin + e]);
      }
      for (int64_t e = 0; e < width; ++e) sum[b * E + begin + e] = static_cast<T>(total[e]);
    }
  }
}

}  // namespace

void add_block_sums(const float* partial, const TokenBlocks& blocks, int64_t E, float* sum) {
  add_blocks<double>(partial, blocks, E, sum);
}

void add_block_counts(const int32_t* partial, const TokenBlocks& blocks, int64_t E, int32_t* sum) {
  add_blocks<int32_t>(partial, blocks, E, sum);
}

}  // namespace anabranch
