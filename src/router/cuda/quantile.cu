// The histogram of quantile balancing. [E, bins] counts exceed the shared memory of an SM. A forward kernel, whose
// blocks process all experts, could therefore only count in global memory, which takes several times as long as
// routing. Instead it writes one threshold per token; here each block counts a few experts in shared memory for a part
// of the tokens, whose logits it reads again. Counts are integers, so the order of additions does not matter.
//
// Shared memory holds [bins][experts]; the number of experts is a power of two, 32 if their counts fit. A lane
// processes kItems consecutive experts of a token, in an order that depends on the token. The lanes of a warp cover all
// experts of kItems tokens, so they count different experts at any time, in different banks, whatever their bins are:
//
//     lane          0  1 ...  7 |  8  9 ... 15 | 16 17 ... 23 | 24 25 ... 31     for 32 experts, kItems = 4
//     first expert  0  4 ... 28 |  1  5 ... 29 |  2  6 ... 30 |  3  7 ... 31
//     next expert   1  5 ... 29 |  0  4 ... 28 |  3  7 ... 31 |  2  6 ... 30     item i ^ token
#include "router/cuda/quantile.cuh"

#include <algorithm>

#include "balance/token_tiles.h"
#include "core/cuda/device.h"
#include "core/cuda/dynamic_memory.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/shared_array.cuh"
#include "core/cuda/vector.cuh"
#include "core/cuda/warp.cuh"
#include "core/dtype.h"
#include "core/tensor.h"
#include "router/cuda/row.cuh"
#include "router/quantile.h"

namespace anabranch::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int64_t kMaxSharedBytes = 224 << 10;
constexpr int kLaneBytes = 8;         // bytes of logits per lane and token
constexpr int64_t kTile = 8 * kWarp;  // counts that a warp adds to the histogram at a time

struct QuantileCall {
  RouterForward op;
  const TokenScale* scales;
  int experts;            // per block, a power of two
  int slices;             // number of groups of `experts` experts
  int64_t tokens;         // per block
  unsigned row_bytes;     // bytes of a row of logits
  int counts;             // number of counts in shared memory, whole tiles
  bool rows_are_aligned;  // the items of a lane are aligned to their total size
};

template <int kScore>
__device__ __forceinline__ TokenScale load_scale(const TokenScale* scale) {
  if constexpr (kScore != AB_SOFTMAX) return {__ldcg(&scale->threshold), 0.0f, 0.0f};
  const auto words = __ldcg(reinterpret_cast<const float4*>(scale));
  return {words.x, words.y, words.z};
}

template <int kScore>
__device__ __forceinline__ float compute_score(const TokenScale& scale, float z) {
  if constexpr (kScore == AB_SOFTMAX) return RowSoftmax{scale.shift, scale.factor}.power(z) * scale.factor;
  return elementwise_score(kScore, z);
}

// The bin of a position, in the low bits of a sum that rounds down: kBinZero + bin.
constexpr uint32_t kBinZero = 0x4b000000u;  // 2^23
__device__ __forceinline__ uint32_t bin_bits(const QuantileBins& bins, float position) {
  return __float_as_uint(__fadd_rd(fminf(fmaxf(position, 0.0f), bins.last), 0x1p23f));
}

// The logits of a lane for one token, for consecutive experts.
template <class T>
struct Items {
  static constexpr unsigned kCount = kLaneBytes / sizeof(T);
  uint32_t words[kLaneBytes / 4];

  __device__ __forceinline__ void load(const T* row) {
    const auto both = *reinterpret_cast<const uint2*>(row);
    words[0] = both.x;
    words[1] = both.y;
  }
  // Loads the first `count` items; the others are NaN.
  __device__ __forceinline__ void load_some(const T* row, unsigned count) {
    T all[kCount];
    __builtin_memset(all, 0xff, kLaneBytes);
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      if (i < count) all[i] = row[i];
    }
    __builtin_memcpy(words, all, kLaneBytes);
  }
  // z[i] = item i ^ turn.
  __device__ __forceinline__ void permuted(unsigned turn, float (&z)[kCount]) const {
    const bool swapped = (turn & (kCount / 2)) != 0;
    const uint32_t ordered[] = {swapped ? words[1] : words[0], swapped ? words[0] : words[1]};
#pragma unroll
    for (unsigned i = 0; i < kCount; ++i) {
      const uint32_t word = ordered[i * sizeof(T) / 4];
      if constexpr (sizeof(T) == 4) {
        z[i] = __uint_as_float(word);
      } else {
        // Move the half to the upper half, and zeros to the lower.
        const uint32_t raised = __byte_perm(word, 0, (i ^ turn) % 2 == 0 ? 0x1044u : 0x3244u);
        z[i] = std::is_same_v<T, BFloat16> ? __uint_as_float(raised) : high_half<T>(raised);
      }
    }
  }
};

// kInShared: counts are in shared memory. Otherwise the counts of one expert exceed it, and blocks count in global
// memory.
template <class T, int kScore, bool kInShared>
__global__ void __launch_bounds__(kThreads) count_thresholds(const __grid_constant__ QuantileCall call) {
  constexpr unsigned kItems = Items<T>::kCount;
  constexpr unsigned kTokens = 2;  // tokens per lane at a time
  int32_t* const counts = dynamic_shared_array<int32_t>();
  const RouterForward& op = call.op;
  let_next_kernel_start();
  const SharedArray<int32_t> shared(counts);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) * 4; i < call.counts; i += kThreads * 4) {
    store_shared(shared.from(i).address(), int4{});
  }
  wait_for_previous_kernel();
  __syncthreads();

  const QuantileBins bins(op.qb_bin_bounds, op.qb_bins);
  const auto experts = static_cast<unsigned>(call.experts);
  const unsigned first = blockIdx.x % static_cast<unsigned>(call.slices) * experts;
  const int64_t begin = blockIdx.x / static_cast<unsigned>(call.slices) * call.tokens;
  const auto tokens = static_cast<unsigned>(min(call.tokens, op.T - begin));
  const unsigned lanes = max(experts / kItems, 1u);  // lanes per token
  const unsigned step = kThreads / lanes;
  const unsigned own = threadIdx.x % lanes * kItems;  // the first of the lane's experts
  const unsigned turn = threadIdx.x / lanes % kItems;
  const unsigned last = min(experts, static_cast<unsigned>(op.E) - first);
  const unsigned items = last > own ? min(last - own, kItems) : 0;  // number of items inside the row
  const char* const logits =
      reinterpret_cast<const char*>(static_cast<const T*>(op.logits) + begin * op.E + first + own);
  const char* const scales = reinterpret_cast<const char*>(call.scales + begin);
  const unsigned bin_bytes = experts * sizeof(int32_t);
  unsigned columns[kItems];  // base addresses: bin_bits * bin_bytes + columns[i] is the address of the count
#pragma unroll
  for (unsigned i = 0; i < kItems; ++i) columns[i] = shared.from(own + (i ^ turn)).address() - kBinZero * bin_bytes;

  struct Group {
    Items<T> items[kTokens];
    TokenScale scale[kTokens];
  };
  // Past the last token, loads the last token again.
  const auto load = [&](unsigned t, Group* group) {
    uint64_t at[kTokens];
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      at[i] = min(t + i * step, tokens - 1);
      group->scale[i] = load_scale<kScore>(reinterpret_cast<const TokenScale*>(scales + at[i] * sizeof(TokenScale)));
    }
    if (call.rows_are_aligned) {
#pragma unroll
      for (unsigned i = 0; i < kTokens; ++i) {
        group->items[i].load(reinterpret_cast<const T*>(logits + at[i] * call.row_bytes));
      }
    } else {
#pragma unroll
      for (unsigned i = 0; i < kTokens; ++i) {
        group->items[i].load_some(reinterpret_cast<const T*>(logits + at[i] * call.row_bytes), items);
      }
    }
  };
  const auto count = [&](unsigned t, const Group& group) {
    float position[kTokens][kItems];
    float probe = 0.0f;  // NaN if any position is NaN
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      const float threshold = t + i * step < tokens ? group.scale[i].threshold : NAN;
      group.items[i].permuted(turn, position[i]);
#pragma unroll
      for (unsigned k = 0; k < kItems; ++k) {
        float& x = position[i][k];
        x = bins.position(threshold, compute_score<kScore>(group.scale[i], x));
        probe += x;
      }
    }
    const auto count_one = [&](float x, unsigned k) {
      if constexpr (kInShared) {
        SharedArray<int32_t>(bin_bits(bins, x) * bin_bytes + columns[k]).add(0, 1);
      } else {
        atomicAdd(op.qb_histogram + (first + own + (k ^ turn)) * op.qb_bins + (bin_bits(bins, x) - kBinZero), 1);
      }
    };
    if (probe == probe) {
#pragma unroll
      for (unsigned i = 0; i < kTokens * kItems; ++i) count_one(position[i / kItems][i % kItems], i % kItems);
    } else {
#pragma unroll
      for (unsigned i = 0; i < kTokens * kItems; ++i) {
        const float x = position[i / kItems][i % kItems];
        if (x == x) count_one(x, i % kItems);
      }
    }
  };
  if (items > 0) {
    Group groups[2];
    unsigned t = threadIdx.x / lanes;
    load(t, &groups[0]);
#pragma unroll 1
    for (; t < tokens; t += 2 * kTokens * step) {
      load(t + kTokens * step, &groups[1]);
      count(t, groups[0]);
      load(t + 2 * kTokens * step, &groups[0]);
      count(t + kTokens * step, groups[1]);
    }
  }
  if constexpr (!kInShared) return;
  __syncthreads();

  // Each warp transposes tiles from [bins][experts] to [experts][bins] in place, so that adjacent lanes add to adjacent
  // counts of the histogram. A lane holds 8 bins of an expert after the transposition. The halves of every other row
  // are swapped to avoid bank conflicts.
  constexpr unsigned kOwn = kTile / kWarp;
  const auto lane = static_cast<unsigned>(lane_index());
  const auto bins_in_all = static_cast<unsigned>(op.qb_bins);
  const unsigned tile_bins = static_cast<unsigned>(kTile) / experts;
  const unsigned from = lane / experts * kOwn * experts + lane % experts;
  const unsigned to = lane % experts * tile_bins + lane / experts * kOwn;
  const unsigned swap = to / kWarp % 2 * 4;
  unsigned target[kOwn];  // offsets of the counts in the histogram of the block's experts
#pragma unroll
  for (unsigned i = 0; i < kOwn; ++i) {
    const unsigned at = i * kWarp + lane;
    target[i] = at / tile_bins * bins_in_all + at % tile_bins;
  }
#pragma unroll 1
  for (unsigned tile = static_cast<unsigned>(warp_index()); tile * kTile < static_cast<unsigned>(call.counts);
       tile += kThreads / kWarp) {
    const SharedArray<int32_t> place = shared.from(tile * kTile);
    int32_t n[kOwn];
    int32_t any = 0;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) any |= n[i] = place[from + i * experts];
    if (!__any_sync(kAllLanes, any != 0)) continue;
    __syncwarp();
    store_shared(place.from(to + swap).address(), int4{n[0], n[1], n[2], n[3]});
    store_shared(place.from(to + (swap ^ 4)).address(), int4{n[4], n[5], n[6], n[7]});
    __syncwarp();
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) n[i] = place[(lane ^ i % 2 * 4) + i * kWarp];
    int32_t* const histogram = op.qb_histogram + first * op.qb_bins + tile * tile_bins;
    if ((tile + 1) * tile_bins <= bins_in_all && last == experts) {
#pragma unroll
      for (unsigned i = 0; i < kOwn; ++i) atomicAdd(histogram + target[i], n[i]);
    } else {
#pragma unroll
      for (unsigned i = 0; i < kOwn; ++i) {
        if (n[i] != 0) atomicAdd(histogram + target[i], n[i]);  // only for existing bins and experts
      }
    }
  }
}

template <class T, bool kInShared>
void (*select_kernel(int32_t score_function))(QuantileCall) {
  return score_function == AB_SOFTMAX   ? count_thresholds<T, AB_SOFTMAX, kInShared>
         : score_function == AB_SIGMOID ? count_thresholds<T, AB_SIGMOID, kInShared>
                                        : count_thresholds<T, AB_SQRTSOFTPLUS, kInShared>;
}

// The available shared memory per block on the current device.
int64_t shared_bytes() {
  Device device;
  if (current_device(&device) != cudaSuccess) return 0;
  return std::min<int64_t>(kMaxSharedBytes, device.max_block_shared_bytes);
}

}  // namespace

ab_status launch_count_thresholds(const RouterForward& op, const TokenScale* scales, cudaStream_t stream) {
  if (op.T == 0) {
    const cudaError_t failure =
        cudaMemsetAsync(op.qb_histogram, 0, static_cast<size_t>(op.E * op.qb_bins) * sizeof(int32_t), stream);
    return failure == cudaSuccess ? ok() : failed("router histogram", failure);
  }
  QuantileCall call{};
  call.op = op;
  call.scales = scales;
  const auto num_counts = [&op](int64_t experts) { return (experts * op.qb_bins + kTile - 1) / kTile * kTile; };
  const int64_t max_counts = shared_bytes() / static_cast<int64_t>(sizeof(int32_t));
  const bool in_shared = num_counts(1) <= max_counts;
  call.experts = 1;
  while (call.experts < kWarp && call.experts < op.E && (!in_shared || num_counts(2 * call.experts) <= max_counts)) {
    call.experts *= 2;
  }
  call.slices = static_cast<int>((op.E + call.experts - 1) / call.experts);
  call.counts = in_shared ? static_cast<int>(num_counts(call.experts)) : 0;
  const auto size = static_cast<int64_t>(dtype_size(op.logits_dtype));
  const int64_t items = kLaneBytes / size;
  call.row_bytes = static_cast<unsigned>(op.E * size);
  call.rows_are_aligned =
      reinterpret_cast<uintptr_t>(op.logits) % kLaneBytes == 0 && op.E % items == 0 && call.experts % items == 0;
  // Two blocks per SM if their counts fit. A block has at least kMinTokens tokens, or clearing would take longer than
  // counting.
  constexpr int64_t kMinTokens = 64;
  const int64_t resident = TokenTiles::kMultiprocessors * (2 * call.counts <= max_counts ? 2 : 1);
  const int64_t parts = std::clamp<int64_t>(resident / call.slices, 1, (op.T + kMinTokens - 1) / kMinTokens);
  call.tokens = (op.T + parts - 1) / parts;
  const int64_t blocks = call.slices * ((op.T + call.tokens - 1) / call.tokens);
  void (*kernel)(QuantileCall) = nullptr;
  with_float_type(op.logits_dtype, [&]<class T>(T) {
    kernel = in_shared ? select_kernel<T, true>(op.score_function) : select_kernel<T, false>(op.score_function);
  });
  return launch("router histogram", kernel, {blocks, kThreads, call.counts * sizeof(int32_t), stream, true}, call);
}

}  // namespace anabranch::cuda
