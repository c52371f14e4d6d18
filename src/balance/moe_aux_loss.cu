// ab_cuda_moe_aux_loss: column sums of the scores, computed as by ab_cuda_score_sum, then their loss. All rows of the
// gradient are equal.
#include "anabranch/cuda.h"
#include "balance/loss.cuh"
#include "balance/score_sum.cuh"
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "core/range.h"
#include "core/tensor.h"

namespace anabranch::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 64;  // rows per block

// Each thread writes one column of the block's rows.
__global__ void __launch_bounds__(kThreads) gradient_kernel(const MoeAuxLoss op, int64_t strips) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t c = blockIdx.x % strips * kThreads + threadIdx.x;
  if (c >= op.C) return;
  const double d_loss = op.d_loss.data == nullptr ? 1.0 : count_at(op.d_loss, 0);
  const double factor = loss_factor(op.column_loss, 0);
  const auto gradient = static_cast<float>(factor != 0.0 ? d_loss * loss_gradient(op.column_loss, factor, c) : 0.0);
  const int64_t begin = blockIdx.x / strips * kRows;
  const int64_t end = begin + kRows < op.T ? begin + kRows : op.T;
  with_float_type(op.d_probs_dtype, [&]<class T>(T) {
    const T value = from_float<T>(gradient);
    T* const to = static_cast<T*>(op.d_probs) + c;
#pragma unroll 4
    for (int64_t t = begin; t < end; ++t) to[t * op.C] = value;
  });
}

// Checks a call and divides its workspace: the column sums, then the sums of blocks of tokens.
ab_status prepare(const ab_moe_aux_loss_args* args, void* workspace, MoeAuxLoss* op, ColumnSums* sums, size_t* bytes) {
  AB_RETURN_IF_ERROR(check_moe_aux_loss(args, op));
  *bytes = 0;
  if (op->loss == nullptr || op->C == 0) return ok();
  const size_t own = (static_cast<size_t>(op->C) * sizeof(float) + 63) / 64 * 64;
  auto* const memory = static_cast<char*>(workspace);
  sums->scores = op->probs;
  sums->dtype = op->probs_dtype;
  sums->E = op->C;
  sums->sum = memory == nullptr ? op->loss : reinterpret_cast<float*>(memory);  // any address for a query
  AB_RETURN_IF_ERROR(prepare_column_sums(op->T, 1, memory == nullptr ? nullptr : memory + own, sums, bytes));
  op->column_loss.score_sum = sums->sum;
  op->column_loss.loss = op->loss;
  *bytes += own;
  return ok();
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_moe_aux_loss_workspace(const ab_moe_aux_loss_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  MoeAuxLoss op;
  cuda::ColumnSums sums;
  return cuda::prepare(args, nullptr, &op, &sums, bytes);
}

ab_status ab_cuda_moe_aux_loss(const ab_moe_aux_loss_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::aux_loss);
  MoeAuxLoss op;
  cuda::ColumnSums sums;
  size_t bytes = 0;
  AB_RETURN_IF_ERROR(cuda::prepare(args, exec->workspace, &op, &sums, &bytes));
  AB_RETURN_IF_ERROR(check_workspace(exec, bytes));
  const cudaStream_t stream = cuda::stream_of(exec);
  if (op.loss != nullptr) {
    if (op.C > 0) AB_RETURN_IF_ERROR(cuda::launch_column_sums(sums, stream));
    op.column_loss.loss = op.loss;
    AB_RETURN_IF_ERROR(cuda::launch_load_balance_loss(op.column_loss, stream));
  }
  if (op.d_probs == nullptr) return ok();
  const int64_t strips = (op.C + cuda::kThreads - 1) / cuda::kThreads;
  const int64_t blocks = strips * ((op.T + cuda::kRows - 1) / cuda::kRows);
  return cuda::launch("moe_aux_loss gradient", cuda::gradient_kernel, {blocks, cuda::kThreads, 0, stream, true}, op,
                      strips);
}

}  // extern "C"
