// ab_cuda_load_balance_loss: one block, which adds in a fixed order.
#include "balance/loss.cuh"

#include "anabranch/cuda.h"
#include "core/cuda/launch.h"
#include "core/cuda/warp.cuh"
#include "core/entry.h"

namespace anabranch::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) loss_kernel(const LoadBalanceLoss op) {
  __shared__ double sums[kThreads];
  let_next_kernel_start();
  wait_for_previous_kernel();
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < op.B * op.E; i += kThreads) {
    const double factor = loss_factor(op, i / op.E);
    const double gradient = loss_gradient(op, factor, i);
    if (factor != 0.0) sum += gradient * op.score_sum[i];
    if (op.d_score_sum != nullptr) op.d_score_sum[i] = static_cast<float>(gradient);
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half >= 1; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0 && op.loss != nullptr) *op.loss = static_cast<float>(sums[0]);
}

}  // namespace

ab_status launch_load_balance_loss(const LoadBalanceLoss& op, cudaStream_t stream) {
  return launch("load_balance_loss", loss_kernel, {1, kThreads, 0, stream, true}, op);
}

}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" ab_status ab_cuda_load_balance_loss(const ab_load_balance_loss_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  LoadBalanceLoss op;
  AB_RETURN_IF_ERROR(check_load_balance_loss(args, &op));
  return cuda::launch_load_balance_loss(op, cuda::stream_of(exec));
}
