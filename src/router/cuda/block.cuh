// Common code of the forward kernels: their arguments, the layout of their shared memory, and the statistics of a
// block.
#pragma once

#include "balance/statistics.cuh"
#include "core/cuda/shared_array.cuh"
#include "core/cuda/warp.cuh"
#include "router/cuda/row.cuh"
#include "router/cuda/select.cuh"
#include "router/forward.h"
#include "router/token_scale.h"

namespace anabranch::cuda {

constexpr int kMaxWarps = 8;  // per block
constexpr int kBlocks = 2;    // per SM, for the register limit

// Layout of a block's shared memory, in byte offsets. Each warp has `warp` bytes, starting at `first_warp`.
struct SharedLayout {
  int counts = 0;  // int32 [E]
  int bias = 0;    // float [kLanes][kItems + 4]
  int first_warp = 0;
  int warp = 0;
  // offsets within a warp's part:
  int rows = 0;        // logits of two rounds; later dense probabilities
  int sums = 0;        // float [tokens][lanes * items]: sums of scores
  int selected = 0;    // int32 [tokens][ranks]: the experts that the selection sorts, by rank
  int experts = 0;     // int32 [tokens][K]
  int values = 0;      // float [tokens][K]: weights
  int list = 0;        // uint16 [tokens][candidates]
  int candidates = 0;  // float [tokens][candidates]
  int keys = 0;        // uint32 [E]; at the end float [E]: score sums of the warp
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
  bool rows_are_aligned;        // the logits are 16-byte aligned
  bool dense_is_aligned;        // the dense outputs are 16-byte aligned
  bool statistics_are_aligned;  // the rows of the statistics are 16-byte aligned
  bool always_exact;            // groups are not whole numbers of lanes
  TokenScale* scales;           // [T], for quantile balancing; else nullptr
};

namespace {

__device__ __forceinline__ void clear_counts(const RouteCall& call, char* shared) {
  if (call.op.tokens_per_expert == nullptr) return;
  int32_t* counts = reinterpret_cast<int32_t*>(shared + call.shared.counts);
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < call.op.E; e += static_cast<int>(blockDim.x)) counts[e] = 0;
}

// Copies the bias to shared memory, to the positions that `place` returns. read() starts loads of as many values as a
// thread holds in registers; store() writes them and copies the others. Loads issued in between complete after them.
class BiasReader {
 public:
  __device__ __forceinline__ explicit BiasReader(const RouterForward& op) : op_(op) {}

  __device__ __forceinline__ void read() {
    if (op_.bias == nullptr) return;
#pragma unroll
    for (unsigned i = 0; i < kAhead; ++i) {
      const unsigned e = threadIdx.x + i * blockDim.x;
      if (e < op_.E) ahead_[i] = load_float(op_.bias, op_.bias_dtype, e);
    }
  }
  template <class Place>
  __device__ __forceinline__ void store(float* bias, const Place& place) const {
    if (op_.bias == nullptr) return;
#pragma unroll
    for (unsigned i = 0; i < kAhead; ++i) {
      const unsigned e = threadIdx.x + i * blockDim.x;
      if (e < op_.E) bias[place(e)] = ahead_[i];
    }
#pragma unroll 1
    for (unsigned e = threadIdx.x + kAhead * blockDim.x; e < op_.E; e += blockDim.x) {
      bias[place(e)] = load_float(op_.bias, op_.bias_dtype, e);
    }
  }

 private:
  static constexpr unsigned kAhead = 4;

  const RouterForward& op_;
  float ahead_[kAhead];
};

// Clears the block's part of the histogram that count_thresholds (quantile.cu) adds to; call after the previous kernel
// has ended.
__device__ __forceinline__ void clear_histogram(const RouterForward& op) {
  const int64_t size = op.E * op.qb_bins;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    op.qb_histogram[i] = 0;
  }
}

__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Writes the block's statistics for the experts of one Count and one Sum, starting at e. The `keys` of the warps hold
// their sums.
template <class Count, class Sum>
__device__ __forceinline__ void write_statistics(const RouteCall& call, unsigned memory, unsigned e) {
  const RouterForward& op = call.op;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * op.E + e;
  if (op.tokens_per_expert != nullptr) {
    *reinterpret_cast<Count*>(call.partials.counts + place) = load_shared<Count>(memory + call.shared.counts + e * 4);
  }
  if (op.score_sum == nullptr) return;
  Sum sum{};
  unsigned warp_sums = memory + call.shared.first_warp + call.shared.keys + e * 4;
#pragma unroll 4
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp, warp_sums += static_cast<unsigned>(call.shared.warp)) {
    sum = add(sum, load_shared<Sum>(warp_sums));
  }
  *reinterpret_cast<Sum*>(call.partials.sums + place) = sum;
}

// Adds the warps' sums and writes the statistics of the block.
__device__ __forceinline__ void end_block(const RouteCall& call, const char* shared) {
  __syncthreads();
  const auto memory = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const auto E = static_cast<unsigned>(call.op.E);
  if (call.statistics_are_aligned) {
#pragma unroll 1
    for (unsigned e = threadIdx.x * 4; e < E; e += blockDim.x * 4) write_statistics<int4, float4>(call, memory, e);
  } else {
#pragma unroll 1
    for (unsigned e = threadIdx.x; e < E; e += blockDim.x) write_statistics<int32_t, float>(call, memory, e);
  }
}

// The k-th given expert of token t in a replay, -1 for none.
__device__ __forceinline__ int32_t forced_expert(const RouterForward& op, int64_t t, int64_t k) {
  const int32_t e = op.forced_experts[t * op.K + k];
  return e >= 0 && e < op.E ? e : -1;
}

}  // namespace
}  // namespace anabranch::cuda
