// The histogram of quantile balancing: [E, bins] counts are more than the shared memory of a multiprocessor holds, so
// that a forward kernel, whose blocks see all experts, could only count in global memory, which takes several times as
// long as routing. It writes one cutoff a token instead; here a block has some experts and counts them in shared
// memory, for a part of the tokens, whose logits it reads again. Counts are whole numbers: any order gives the same.
//
// Shared memory holds [bins][experts], a power of two of experts, 32 if their counts fit: neighbouring lanes have
// neighbouring experts, and count in different banks whatever their bins are.
#include "router/quantile.cuh"

#include <algorithm>

#include "balance/token_tiles.h"
#include "core/cuda/launch.h"
#include "core/cuda/shared.cuh"
#include "core/cuda/warp.cuh"
#include "core/dtype.h"
#include "router/quantile.h"
#include "router/row.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int64_t kMostSharedBytes = 224 << 10;

struct QuantileCall {
  RouterForward op;
  const TokenScale* scales;
  int experts;     // of a block, a power of two
  int slices;      // of so many experts
  int64_t tokens;  // of a block
  bool in_shared;  // else the counts of an expert alone are too many, and all blocks count in global memory
};

__global__ void __launch_bounds__(kThreads) clear(int32_t* counts, int64_t size) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size; i += int64_t{gridDim.x} * kThreads) {
    counts[i] = 0;
  }
}

template <int kScore>
__device__ __forceinline__ float score_of(const TokenScale& scale, float z) {
  if constexpr (kScore == AB_SOFTMAX) return RowSoftmax{scale.shift, scale.factor}.power(z) * scale.factor;
  return elementwise_score(kScore, z);
}

// The whole part of a position, which is at most kMostBins: its last bits after a sum that rounds down.
__device__ __forceinline__ unsigned bin_of(float position) {
  return __float_as_uint(__fadd_rd(position, 0x1p23f)) & 0x7fffffu;
}

// A thread has one expert and goes through the tokens of the block in steps.
template <class T, int kScore>
__global__ void __launch_bounds__(kThreads) count_cutoffs(const __grid_constant__ QuantileCall call) {
  constexpr int kUnroll = 8;           // tokens whose logits are on their way
  extern __shared__ int32_t counts[];  // [bins][experts]
  const RouterForward& op = call.op;
  let_next_kernel_start();
  const auto experts = static_cast<unsigned>(call.experts);
  const auto bins_in_all = static_cast<unsigned>(op.qb_bins);
  if (call.in_shared) {
    for (unsigned i = threadIdx.x; i < experts * bins_in_all; i += kThreads) counts[i] = 0;
  }
  wait_for_previous_kernel();
  __syncthreads();

  const QuantileBins bins(op.qb_bin_bounds, op.qb_bins);
  const unsigned first = blockIdx.x % static_cast<unsigned>(call.slices) * experts;
  const unsigned own = threadIdx.x % experts;
  const bool has_expert = first + own < op.E;
  const unsigned step = kThreads / experts;
  const int64_t begin = blockIdx.x / static_cast<unsigned>(call.slices) * call.tokens + threadIdx.x / experts;
  const int64_t end = min((blockIdx.x / static_cast<unsigned>(call.slices) + 1) * call.tokens, op.T);
  const SharedArray<int32_t> column(SharedArray<int32_t>(counts).from(own).address());
  int32_t* const global_row = op.qb_histogram + (first + own) * op.qb_bins;
  const T* const logits = static_cast<const T*>(op.logits) + first + own;
#pragma unroll 1
  for (int64_t t = begin; t < end; t += int64_t{kUnroll} * step) {
    T z[kUnroll];
    TokenScale scale[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t at = t + i * static_cast<int64_t>(step);
      z[i] = T{};
      scale[i] = {NAN, 0.0f, 0.0f};
      if (at < end && has_expert) {
        z[i] = logits[at * op.E];
        scale[i].cutoff = call.scales[at].cutoff;
        if constexpr (kScore == AB_SOFTMAX) {
          scale[i].shift = call.scales[at].shift;
          scale[i].factor = call.scales[at].factor;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const float position = bins.position(scale[i].cutoff, score_of<kScore>(scale[i], to_float(z[i])));
      const bool counted = position == position;
      if (call.in_shared) {
        column.count_if(counted, bin_of(position) * experts);
      } else if (counted) {
        atomicAdd(global_row + bin_of(position), 1);
      }
    }
  }
  if (!call.in_shared) return;
  __syncthreads();
  // A warp takes 8 bins of 4 experts: whole sectors of global memory.
  constexpr unsigned kBinsAtOnce = 8;
  const unsigned experts_at_once = min(experts, kWarp / kBinsAtOnce);
  const unsigned lane = static_cast<unsigned>(lane_index());
  const unsigned tiles = (bins_in_all + kBinsAtOnce - 1) / kBinsAtOnce * (experts / experts_at_once);
  for (unsigned tile = static_cast<unsigned>(warp_index()); tile < tiles; tile += kThreads / kWarp) {
    const unsigned bin = tile / (experts / experts_at_once) * kBinsAtOnce + lane % kBinsAtOnce;
    const unsigned e = tile % (experts / experts_at_once) * experts_at_once + lane / kBinsAtOnce;
    if (bin >= bins_in_all || lane / kBinsAtOnce >= experts_at_once || first + e >= op.E) continue;
    const int32_t count = counts[bin * experts + e];
    if (count != 0) atomicAdd(op.qb_histogram + (first + e) * op.qb_bins + bin, count);
  }
}

template <class T>
void (*kernel_of(int32_t score_function))(QuantileCall) {
  return score_function == AB_SOFTMAX   ? count_cutoffs<T, AB_SOFTMAX>
         : score_function == AB_SIGMOID ? count_cutoffs<T, AB_SIGMOID>
                                        : count_cutoffs<T, AB_SQRTSOFTPLUS>;
}

// Of a block, as the current device has it.
int64_t shared_bytes() {
  int device = 0;
  int bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) return 0;
  return std::min<int64_t>(kMostSharedBytes, bytes);
}

}  // namespace

ab_status launch_clear_histogram(const RouterForward& op, cudaStream_t stream) {
  const int64_t size = op.E * op.qb_bins;
  const int64_t blocks = std::min((size + kThreads - 1) / kThreads, 2 * TokenTiles::kMultiprocessors);
  return launch("router histogram", clear, {blocks, kThreads, 0, stream, true}, op.qb_histogram, size);
}

ab_status launch_count_cutoffs(const RouterForward& op, const TokenScale* scales, cudaStream_t stream) {
  if (op.T == 0) return ok();
  QuantileCall call{};
  call.op = op;
  call.scales = scales;
  const int64_t column_bytes = op.qb_bins * static_cast<int64_t>(sizeof(int32_t));
  const int64_t most_bytes = shared_bytes();
  call.in_shared = column_bytes <= most_bytes;
  call.experts = 1;
  while (call.experts < kWarp && call.experts < op.E &&
         (!call.in_shared || 2 * call.experts * column_bytes <= most_bytes)) {
    call.experts *= 2;
  }
  call.slices = static_cast<int>((op.E + call.experts - 1) / call.experts);
  const int64_t shared = call.in_shared ? call.experts * column_bytes : 0;
  // Two blocks of a multiprocessor where their counts fit; and no block for so few tokens that clearing takes longer.
  constexpr int64_t kFewestTokens = 64;
  const int64_t resident = TokenTiles::kMultiprocessors * (2 * shared <= most_bytes ? 2 : 1);
  const int64_t parts = std::clamp<int64_t>(resident / call.slices, 1, (op.T + kFewestTokens - 1) / kFewestTokens);
  call.tokens = (op.T + parts - 1) / parts;
  const int64_t blocks = call.slices * ((op.T + call.tokens - 1) / call.tokens);
  void (*kernel)(QuantileCall) = nullptr;
  with_float_type(op.logits_dtype, [&]<class T>(T) { kernel = kernel_of<T>(op.score_function); });
  return launch("router histogram", kernel, {blocks, kThreads, static_cast<size_t>(shared), stream, true}, call);
}

}  // namespace anabranch::cuda
