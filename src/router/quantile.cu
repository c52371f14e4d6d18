// The histogram of quantile balancing: [E, bins] counts are more than the shared memory of a multiprocessor holds, so
// that a forward kernel, whose blocks see all experts, could only count in global memory, which takes several times as
// long as routing. It writes one cutoff a token instead; here a block has some experts and counts them in shared
// memory, for a part of the tokens, whose logits it reads again. Counts are whole numbers: any order gives the same.
#include "router/quantile.cuh"

#include <algorithm>

#include "balance/token_tiles.h"
#include "core/cuda/launch.h"
#include "core/cuda/shared.cuh"
#include "core/cuda/warp.cuh"
#include "core/dtype.h"
#include "core/tensor.h"
#include "router/quantile.h"
#include "router/row.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kNear = 4;  // neighbouring experts of a thread
constexpr int64_t kSharedBytes = 208 << 10;

struct QuantileCall {
  RouterForward op;
  const TokenScale* scales;
  int experts;     // of a block
  int slices;      // of so many experts
  int64_t tokens;  // of a block
  int stride;      // counts of a row in shared memory: odd, so that equal bins of neighbours are in different banks
  bool vectors;    // rows of logits are whole vectors of kNear
  bool in_shared;  // else a row alone is too long, and all blocks count in global memory
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

// kNear neighbouring logits of a row; `vectors`: they begin at a multiple of their size.
template <class T>
__device__ __forceinline__ void load_near(const T* from, bool vectors, int count, float (&z)[kNear]) {
  T loaded[kNear] = {};
  if (vectors) {
    if constexpr (sizeof(T) == 4) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      loaded[0] = four.x, loaded[1] = four.y, loaded[2] = four.z, loaded[3] = four.w;
    } else {
      const uint2 pairs = *reinterpret_cast<const uint2*>(from);
      loaded[0].bits = static_cast<uint16_t>(pairs.x), loaded[1].bits = static_cast<uint16_t>(pairs.x >> 16);
      loaded[2].bits = static_cast<uint16_t>(pairs.y), loaded[3].bits = static_cast<uint16_t>(pairs.y >> 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kNear; ++i) {
      if (i < count) loaded[i] = from[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kNear; ++i) z[i] = to_float(loaded[i]);
}

// The whole part of a position, which is at most kMostBins: its last bits after a sum that rounds down.
__device__ __forceinline__ unsigned bin_of(float position) {
  return __float_as_uint(__fadd_rd(position, 0x1p23f)) & 0x7fffffu;
}

// A thread has kNear neighbouring experts, its neighbour the next ones, and goes through the tokens of the block in
// steps.
template <class T, int kScore>
__global__ void __launch_bounds__(kThreads) count_cutoffs(const __grid_constant__ QuantileCall call) {
  constexpr int kUnroll = 4;           // tokens whose logits are on their way
  extern __shared__ int32_t counts[];  // [experts][stride]
  const RouterForward& op = call.op;
  let_next_kernel_start();
  const int first = static_cast<int>(blockIdx.x) % call.slices * call.experts;
  const int experts = min(call.experts, static_cast<int>(op.E) - first);
  for (int i = static_cast<int>(threadIdx.x); call.in_shared && i < experts * call.stride; i += kThreads) counts[i] = 0;
  wait_for_previous_kernel();
  __syncthreads();

  const QuantileBins bins(op.qb_bin_bounds, op.qb_bins);
  const int near = (experts + kNear - 1) / kNear;  // threads of a token
  const int step = kThreads / near;
  const int own = static_cast<int>(threadIdx.x) % near * kNear;
  const int count = min(kNear, experts - own);
  const bool vectors = call.vectors && count == kNear;
  const int64_t begin = blockIdx.x / static_cast<unsigned>(call.slices) * call.tokens;
  const int64_t end = min(begin + call.tokens, op.T);
  const SharedArray<int32_t> rows(
      SharedArray<int32_t>(counts).from(static_cast<unsigned>(own * call.stride)).address());
  int32_t* const global_rows = op.qb_histogram + (first + own) * op.qb_bins;
  const T* const logits = static_cast<const T*>(op.logits) + first + own;
  const int64_t lane_token = threadIdx.x / static_cast<unsigned>(near);
  if (lane_token < step) {
#pragma unroll 1
    for (int64_t t = begin + lane_token; t < end; t += int64_t{kUnroll} * step) {
      float z[kUnroll][kNear];
      TokenScale scale[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = t + i * step;
        scale[i].cutoff = NAN;
        if (at < end) {
          scale[i].cutoff = call.scales[at].cutoff;
          if constexpr (kScore == AB_SOFTMAX) {
            scale[i].shift = call.scales[at].shift;
            scale[i].factor = call.scales[at].factor;
          }
          load_near(logits + at * op.E, vectors, count, z[i]);
        } else {
#pragma unroll
          for (int j = 0; j < kNear; ++j) z[i][j] = 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
        for (int j = 0; j < kNear; ++j) {
          const float position = bins.position(scale[i].cutoff, score_of<kScore>(scale[i], z[i][j]));
          const bool counted = position == position && j < count;
          if (call.in_shared) {
            rows.count_if(counted, static_cast<unsigned>(j * call.stride) + bin_of(position));
          } else if (counted) {
            atomicAdd(global_rows + j * op.qb_bins + bin_of(position), 1);
          }
        }
      }
    }
  }
  if (!call.in_shared) return;
  __syncthreads();
  const auto width = static_cast<int>(op.qb_bins);
  for (int e = 0; e < experts; ++e) {
    for (int bin = static_cast<int>(threadIdx.x); bin < width; bin += kThreads) {
      const int32_t counted = counts[e * call.stride + bin];
      if (counted != 0) atomicAdd(op.qb_histogram + (first + e) * op.qb_bins + bin, counted);
    }
  }
}

template <class T>
void (*kernel_of(int32_t score_function))(QuantileCall) {
  return score_function == AB_SOFTMAX   ? count_cutoffs<T, AB_SOFTMAX>
         : score_function == AB_SIGMOID ? count_cutoffs<T, AB_SIGMOID>
                                        : count_cutoffs<T, AB_SQRTSOFTPLUS>;
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
  const int64_t stride = op.qb_bins | 1;
  const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(int32_t));
  call.in_shared = row_bytes <= kSharedBytes;
  const int64_t most = call.in_shared ? std::min<int64_t>(kSharedBytes / row_bytes, kThreads) : kThreads;
  const auto even = [&](int64_t slices) {  // experts of each, whole vectors where that is possible
    const int64_t experts = (op.E + slices - 1) / slices;
    return most < kNear ? experts : (experts + kNear - 1) / kNear * kNear;
  };
  int64_t slices = (op.E + most - 1) / most;
  while (even(slices) > most) ++slices;
  call.experts = static_cast<int>(even(slices));
  call.slices = static_cast<int>((op.E + call.experts - 1) / call.experts);
  const int64_t near_bytes = kNear * static_cast<int64_t>(dtype_size(op.logits_dtype));
  call.vectors = op.E % kNear == 0 && call.experts % kNear == 0 &&
                 reinterpret_cast<uintptr_t>(op.logits) % static_cast<uintptr_t>(near_bytes) == 0;
  call.stride = call.in_shared ? static_cast<int>(stride) : 0;
  const int64_t shared = call.in_shared ? call.experts * row_bytes : 0;
  // Two blocks of a multiprocessor where their counts fit; and no block for so few tokens that clearing takes longer.
  constexpr int64_t kFewestTokens = 64;
  const int64_t resident = TokenTiles::kMultiprocessors * (2 * shared <= kSharedBytes ? 2 : 1);
  const int64_t parts = std::clamp<int64_t>(resident / call.slices, 1, (op.T + kFewestTokens - 1) / kFewestTokens);
  call.tokens = (op.T + parts - 1) / parts;
  const int64_t blocks = call.slices * ((op.T + call.tokens - 1) / call.tokens);
  void (*kernel)(QuantileCall) = nullptr;
  with_float_type(op.logits_dtype, [&]<class T>(T) { kernel = kernel_of<T>(op.score_function); });
  return launch("router histogram", kernel, {blocks, kThreads, static_cast<size_t>(shared), stream, true}, call);
}

}  // namespace anabranch::cuda
