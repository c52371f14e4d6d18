#include "balance/score_sum.h"

#include "anabranch/balance.h"
#include "balance/check.h"
#include "balance/token_blocks.h"
#include "core/entry.h"
#include "core/tensor.h"
#include "core/threads.h"

namespace anabranch {
namespace {

struct ScoreSum {
  int64_t T = 0;
  int64_t E = 0;
  TokenBlocks blocks{0, 0};

  size_t workspace() const {
    return static_cast<size_t>(blocks.count() * E) * sizeof(float);
  }  // one row of sums per block
};

ab_status parse(const ab_score_sum_args* args, ScoreSum* op) {
  AB_RETURN_IF_ERROR(check_tensor("scores", args->scores, kFloats, {{"T"}, {"E"}}));
  op->T = args->scores->shape[0];
  op->E = args->scores->shape[1];
  int64_t sequences = 1;
  AB_RETURN_IF_ERROR(check_statistics("score_sum", args->score_sum, kFloat32, op->T, op->E, &sequences));
  op->blocks = TokenBlocks(op->T, sequences);
  return ok();
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_score_sum_workspace(const ab_score_sum_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  ScoreSum op;
  AB_RETURN_IF_ERROR(parse(args, &op));
  return report_workspace(op.workspace(), bytes);
}

ab_status ab_score_sum(const ab_score_sum_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  ScoreSum op;
  AB_RETURN_IF_ERROR(parse(args, &op));
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace()));

  float* partial = static_cast<float*>(exec->workspace);
  const char* scores = data<const char>(args->scores);
  const int64_t row_bytes = op.E * dtype_size(args->scores->dtype);
  const ScoreSumKernels& kernels = AB_SELECT_ISA(kScoreSum);
  if (op.E == 0) return ok();  // without experts, the numbers of tokens and sequences are unlimited
  parallel_for(num_threads(exec), op.blocks.count(), [&](int64_t block, int) {
    const int64_t begin = op.blocks.begin(block);
    kernels.add_rows(scores + begin * row_bytes, args->scores->dtype, op.blocks.end(block) - begin, op.E,
                     partial + block * op.E);
  });
  add_block_sums(partial, op.blocks, op.E, data<float>(args->score_sum));
  return ok();
}

}  // extern "C"
