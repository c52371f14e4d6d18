// What the forward kernels share: their call, the layout of their shared memory, and the statistics of a block.
#pragma once

#include "balance/statistics.cuh"
#include "core/cuda/warp.cuh"
#include "router/forward.h"
#include "router/row.cuh"
#include "router/select.cuh"
#include "router/token_scale.h"

namespace anabranch::cuda {

constexpr int kMostWarps = 8;  // of a block

// Byte offsets of a block's shared memory; per-warp pieces are `warp` bytes apart from `first_warp` on.
struct SharedLayout {
  int counts = 0;  // int32 [E]
  int bias = 0;    // float [kLanes][kItems + 4]
  int first_warp = 0;
  int warp = 0;
  // within a warp's piece:
  int rows = 0;        // logits of two rounds; dense probabilities
  int sums = 0;        // float [tokens][lanes * items]: sums of scores
  int selected = 0;    // int32 [tokens][ranks]: experts by rank, as many as the selection sorts
  int experts = 0;     // int32 [tokens][K]
  int values = 0;      // float [tokens][K]: weights
  int list = 0;        // uint16 [tokens][candidates]
  int candidates = 0;  // float [tokens][candidates]
  int keys = 0;        // uint32 [E]; in the end float [E]: score sums of the warp
  int groups = 0;      // uint32 [num_groups]
  int map = 0;         // bytes or bits [tokens][E]
  int total = 0;
};

struct RouteCall {
  RouterForward op;
  Selection selection;
  TokenTiles tiles;
  Partials partials;
  SharedLayout shared;
  bool rows_are_aligned;  // logits begin at 16 bytes
  bool dense_is_aligned;  // and so do dense outputs
  bool always_exact;      // groups do not fit the lanes
  TokenScale* scales;     // [T] of quantile balancing; nullptr: none
};

namespace {

// Clears what the block counts in, waits for the kernel before, and brings the bias where `place` says.
template <class PlaceOf>
__device__ __forceinline__ void begin_block(const RouteCall& call, char* shared, const PlaceOf& place) {
  if (call.op.tokens_per_expert != nullptr) {
    int32_t* counts = reinterpret_cast<int32_t*>(shared + call.shared.counts);
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < call.op.E; e += static_cast<int>(blockDim.x)) counts[e] = 0;
  }
  wait_for_previous_kernel();
  if (call.op.bias != nullptr) {
    float* bias = reinterpret_cast<float*>(shared + call.shared.bias);
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < call.op.E; e += static_cast<int>(blockDim.x)) {
      bias[place(e)] = load_float(call.op.bias, call.op.bias_dtype, e);
    }
  }
}

// The block's part of clearing what count_cutoffs (quantile.cu) counts in; when the kernel before has ended.
__device__ __forceinline__ void clear_histogram(const RouterForward& op) {
  const int64_t size = op.E * op.qb_bins;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    op.qb_histogram[i] = 0;
  }
}

// Adds up the warps' sums, which stand in their `keys`, and writes the statistics of the block.
__device__ __forceinline__ void end_block(const RouteCall& call, const char* shared) {
  __syncthreads();
  const RouterForward& op = call.op;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * op.E;
  const int32_t* counts = reinterpret_cast<const int32_t*>(shared + call.shared.counts);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < op.E; e += static_cast<int>(blockDim.x)) {
    if (op.tokens_per_expert != nullptr) call.partials.counts[row + e] = counts[e];
    if (op.score_sum == nullptr) continue;
    float sum = 0.0f;
    for (int warp = 0; warp < warps; ++warp) {
      const char* piece = shared + call.shared.first_warp + warp * call.shared.warp + call.shared.keys;
      sum += reinterpret_cast<const float*>(piece)[e];
    }
    call.partials.sums[row + e] = sum;
  }
}

// The k-th expert of token t in a replay, -1 if there is none.
__device__ __forceinline__ int32_t forced_expert(const RouterForward& op, int64_t t, int64_t k) {
  const int32_t e = op.forced_experts[t * op.K + k];
  return e >= 0 && e < op.E ? e : -1;
}

}  // namespace
}  // namespace anabranch::cuda
