// ab_cuda_score_sum: column sums of dense scores. Warps process rows in turn and accumulate sums in shared memory, one
// column per lane. The sums of the warps, and then those of the blocks, are added in order.
#include "anabranch/cuda.h"
#include "balance/check.h"
#include "balance/score_sum.cuh"
#include "core/cuda/dynamic_memory.cuh"
#include "core/cuda/element.cuh"
#include "core/entry.h"
#include "core/tensor.h"

namespace anabranch::cuda {
namespace {

__global__ void __launch_bounds__(8 * kWarp) score_sum_kernel(const ColumnSums call) {
  float* const sums = dynamic_shared_array<float>();  // [warps][E]
  let_next_kernel_start();
  const int64_t E = call.E;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  for (int64_t i = threadIdx.x; i < warps * E; i += blockDim.x) sums[i] = 0.0f;
  wait_for_previous_kernel();
  __syncthreads();
  float* own = sums + warp_index() * E;
  const int64_t end = call.tiles.end(blockIdx.x);
  for (int64_t t = call.tiles.begin(blockIdx.x) + warp_index(); t < end; t += warps) {
#pragma unroll 4
    for (int64_t e = lane_index(); e < E; e += kWarp) own[e] += load_float(call.scores, call.dtype, t * E + e);
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < E; e += blockDim.x) {
    float sum = 0.0f;
    for (int warp = 0; warp < warps; ++warp) sum += sums[warp * E + e];
    call.partials.sums[static_cast<int64_t>(blockIdx.x) * E + e] = sum;
  }
}

}  // namespace

ab_status prepare_column_sums(int64_t T, int64_t sequences, void* workspace, ColumnSums* call, size_t* bytes) {
  constexpr size_t kSharedBytes = 200 << 10;
  while (call->shared_bytes() > kSharedBytes && call->warps > 1) call->warps /= 2;
  if (call->shared_bytes() > kSharedBytes) {
    return error(AB_UNSUPPORTED, "scores: got %lld columns, expected at most %d on CUDA",
                 static_cast<long long>(call->E), static_cast<int>(kSharedBytes / sizeof(float)));
  }
  call->tiles = TokenTiles(T, sequences, call->warps);
  return report_workspace(place_partials(call->tiles, call->E, nullptr, call->sum, workspace, &call->partials), bytes);
}

ab_status launch_column_sums(const ColumnSums& call, cudaStream_t stream) {
  if (call.E == 0) return ok();  // avoids one block per sequence, of which there may be 2^31
  AB_RETURN_IF_ERROR(launch("score_sum", score_sum_kernel,
                            {call.tiles.count(), call.warps * kWarp, call.shared_bytes(), stream, true}, call));
  return add_block_statistics(call.tiles, call.E, call.partials, nullptr, call.sum, stream);
}

namespace {

ab_status parse(const ab_score_sum_args* args, void* workspace, ColumnSums* call, size_t* bytes) {
  AB_RETURN_IF_ERROR(check_tensor("scores", args->scores, kFloats, {{"T"}, {"E"}}));
  const int64_t T = args->scores->shape[0];
  call->E = args->scores->shape[1];
  int64_t sequences = 1;
  AB_RETURN_IF_ERROR(check_statistics("score_sum", args->score_sum, kFloat32, T, call->E, &sequences));
  call->scores = data<const void>(args->scores);
  call->dtype = args->scores->dtype;
  call->sum = data<float>(args->score_sum);
  return prepare_column_sums(T, sequences, workspace, call, bytes);
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_score_sum_workspace(const ab_score_sum_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  cuda::ColumnSums call;
  return cuda::parse(args, nullptr, &call, bytes);
}

ab_status ab_cuda_score_sum(const ab_score_sum_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  cuda::ColumnSums call;
  size_t bytes = 0;
  AB_RETURN_IF_ERROR(cuda::parse(args, exec->workspace, &call, &bytes));
  AB_RETURN_IF_ERROR(check_workspace(exec, bytes));
  return cuda::launch_column_sums(call, cuda::stream_of(exec));
}

}  // extern "C"
