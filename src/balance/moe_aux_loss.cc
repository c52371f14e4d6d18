// ab_moe_aux_loss: column sums of the scores, computed as by ab_score_sum, then their loss. All rows of the gradient
// are equal.
#include <cstring>

#include "balance/check.h"
#include "balance/loss.h"
#include "balance/score_sum.h"
#include "core/entry.h"
#include "core/tensor.h"
#include "core/threads.h"

namespace anabranch {
namespace {

struct Workspace {
  TokenBlocks blocks;
  int64_t sums;  // number of floats: the sums of each block, then those of all tokens
  size_t bytes;

  explicit Workspace(const MoeAuxLoss& op)
      : blocks(op.T, 1),
        sums(op.loss == nullptr ? 0 : (blocks.count() + 1) * op.C),
        bytes(static_cast<size_t>(sums + (op.d_probs == nullptr ? 0 : op.C)) * sizeof(float)) {}
};

// sum[c] = sum over t of probs[t, c], computed from the sums of blocks of tokens.
void add_columns(const MoeAuxLoss& op, const TokenBlocks& blocks, int threads, float* partial, float* sum) {
  const int64_t row_bytes = op.C * dtype_size(op.probs_dtype);
  const ScoreSumKernels& kernels = AB_SELECT_ISA(kScoreSum);
  parallel_for(threads, blocks.count(), [&](int64_t block, int) {
    const int64_t begin = blocks.begin(block);
    kernels.add_rows(static_cast<const char*>(op.probs) + begin * row_bytes, op.probs_dtype, blocks.end(block) - begin,
                     op.C, partial + block * op.C);
  });
  add_block_sums(partial, blocks, op.C, sum);
}

void write_gradient(const MoeAuxLoss& op, const TokenBlocks& blocks, int threads, void* row) {
  const double d_loss = op.d_loss.data == nullptr ? 1.0 : count_at(op.d_loss, 0);
  const double factor = loss_factor(op.column_loss, 0);
  with_float_type(op.d_probs_dtype, [&]<class T>(T) {
    for (int64_t c = 0; c < op.C; ++c) {
      const double gradient = factor != 0.0 ? d_loss * loss_gradient(op.column_loss, factor, c) : 0.0;
      static_cast<T*>(row)[c] = from_float<T>(static_cast<float>(gradient));
    }
  });
  const auto row_bytes = static_cast<size_t>(op.C * dtype_size(op.d_probs_dtype));
  parallel_for(threads, blocks.count(), [&](int64_t block, int) {
    char* to = static_cast<char*>(op.d_probs) + static_cast<size_t>(blocks.begin(block)) * row_bytes;
    for (int64_t t = blocks.begin(block); t < blocks.end(block); ++t, to += row_bytes) std::memcpy(to, row, row_bytes);
  });
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_moe_aux_loss_workspace(const ab_moe_aux_loss_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  MoeAuxLoss op;
  AB_RETURN_IF_ERROR(check_moe_aux_loss(args, &op));
  return report_workspace(Workspace(op).bytes, bytes);
}

ab_status ab_moe_aux_loss(const ab_moe_aux_loss_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  MoeAuxLoss op;
  AB_RETURN_IF_ERROR(check_moe_aux_loss(args, &op));
  const Workspace workspace(op);
  AB_RETURN_IF_ERROR(check_workspace(exec, workspace.bytes));
  if (op.C == 0) {
    if (op.loss != nullptr) *op.loss = 0.0f;
    return ok();
  }
  auto* const memory = static_cast<float*>(exec->workspace);
  const int threads = num_threads(exec);
  if (op.loss != nullptr) {
    float* const sum = memory + workspace.blocks.count() * op.C;
    add_columns(op, workspace.blocks, threads, memory, sum);
    op.column_loss.score_sum = sum;
    op.column_loss.loss = op.loss;
    load_balance_loss(op.column_loss);
  }
  if (op.d_probs != nullptr) write_gradient(op, workspace.blocks, threads, memory + workspace.sums);
  return ok();
}

}  // extern "C"
