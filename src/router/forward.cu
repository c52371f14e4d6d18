// ab_cuda_router_forward: one read of the logits gives every output.
//
// A warp routes 32 / kLanes neighbouring tokens at a time: kLanes lanes hold the row of a token in registers, kItems
// experts each, find its K best (topk.cuh), and keep sums of the auxiliary scores of their experts over all tokens of the
// block. Rows too wide for registers go through route_wide, a warp a token. What depends on the K selected experts alone
// is done on slots in shared memory, a slot a lane. Dense outputs are rows of zeros in shared memory into which slots are
// scattered; they leave in whole vectors.
#include <climits>

#include "anabranch/cuda.h"
#include "balance/statistics.cuh"
#include "core/tensor.h"
#include "router/check.h"
#include "router/forward.h"
#include "router/row.cuh"
#include "router/select.cuh"
#include "router/topk.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kWarps = 4;  // of a block

// Byte offsets of a block's shared memory; per-warp pieces are `warp` bytes apart from `first_warp` on.
struct SharedLayout {
  int counts = 0;  // int32 [E]
  int bias = 0;    // float [kLanes][kItems + 4]
  int first_warp = 0;
  int warp = 0;
  // within a warp's piece:
  int experts = 0;  // int32 [tokens][K]
  int values = 0;   // float [tokens][K]
  int keys = 0;     // uint32 [E]; after the last token float [E]: sums of the warp
  int groups = 0;   // uint32 [num_groups]
  int probs = 0;    // [tokens][E] in the logits' dtype
  int map = 0;      // bytes or bits [tokens][E]
  int total = 0;
};

struct Call {
  RouterForward op;
  Selection selection;
  TokenTiles tiles;
  Partials partials;
  SharedLayout shared;
  bool vectors;     // rows of logits are whole 16-byte vectors
  bool exact_keys;  // keys of the fast way never confuse two experts
  bool only_exact;  // K is beyond the fast way's lists, or groups do not fit its lanes
};

int dense_map_bytes(const RouterForward& op) {
  if (op.map_format == MapFormat::bytes) return static_cast<int>(op.E);
  if (op.map_format == MapFormat::bits) return static_cast<int>((op.E + 7) / 8);
  return 0;
}

SharedLayout lay_out_shared(const RouterForward& op, int lanes, int items, int warps) {
  SharedLayout s;
  const int tokens = kWarp / lanes;
  const int E = static_cast<int>(op.E);
  int used = 0;
  const auto take = [&used](int bytes) {
    const int begin = used;
    used += (bytes + 15) / 16 * 16;
    return begin;
  };
  s.counts = take(op.tokens_per_expert != nullptr ? E * 4 : 0);
  s.bias = take(op.bias != nullptr ? lanes * (items + 4) * 4 : 0);
  s.first_warp = used;
  used = 0;
  s.experts = take(tokens * op.K * 4);
  s.values = take(tokens * op.K * 4);
  s.keys = take(E * 4);
  s.groups = take(op.num_groups * 4);
  s.probs = take(op.probs != nullptr ? tokens * E * static_cast<int>(dtype_size(op.logits_dtype)) : 0);
  s.map = take(tokens * dense_map_bytes(op));
  s.warp = used;
  s.total = s.first_warp + warps * s.warp;
  return s;
}

// The shared memory of a warp and what it does with the slots of its tokens.
class WarpSlots {
 public:
  __device__ WarpSlots(const Call& call, char* shared)
      : call_(call),
        op_(call.op),
        counts_(reinterpret_cast<int32_t*>(shared + call.shared.counts)),
        warp_(shared + call.shared.first_warp + warp_index() * call.shared.warp) {}

  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(warp_ + offset);
  }
  __device__ int32_t* experts(int token) const { return at<int32_t>(call_.shared.experts) + token * op_.K; }
  __device__ Slots slots(int token) const {
    return {experts(token), at<float>(call_.shared.values) + token * op_.K, op_.K};
  }
  __device__ SelectionScratch scratch() const {
    return {at<uint32_t>(call_.shared.keys), at<uint32_t>(call_.shared.groups)};
  }

  __device__ void clear_dense(int tokens) const {
    if (op_.probs != nullptr) clear(call_.shared.probs, tokens * static_cast<int>(op_.E) * element_size());
    if (map_row_bytes() > 0) clear(call_.shared.map, tokens * map_row_bytes());
  }

  // Weights and outputs of the slots of token t, the token-th of the warp, by its kLanes lanes. All lanes of the warp
  // come here; `present`: t is a token of this block. Slots hold experts.
  template <int kLanes>
  __device__ void finish(int64_t t, int token, int lane, bool present, const RowSoftmax& softmax, float poison) const {
    const Slots own = slots(token);
    for_own_slots<kLanes>(own, lane, [&](int k, int expert) {
      own.values[k] = load_float(op_.logits, op_.logits_dtype, t * op_.E + expert);
    });
    if (op_.wants_weights) {
      score_slots<kLanes>(op_.score_function, op_.normalize, softmax, poison, own, lane);
    }
    for (int k = lane; k < op_.K && present; k += kLanes) {
      const int expert = own.experts[k];
      const float weight = expert < 0 ? 0.0f : own.values[k] * op_.scaling_factor;
      const int64_t slot = t * op_.K + k;
      if (op_.weights != nullptr) op_.weights[slot] = weight;
      if (op_.experts != nullptr) op_.experts[slot] = expert;
      if (op_.map_format == MapFormat::indices) store_index(slot, expert);
      if (expert < 0) continue;
      if (op_.tokens_per_expert != nullptr) atomicAdd(counts_ + expert, 1);
      scatter(token, expert, weight);
    }
  }

  // Writes the dense rows of tokens first .. first + count, and clears the slots' places again.
  template <int kLanes>
  __device__ void copy_dense(int64_t first, int count, int token, int lane) const {
    if (op_.probs == nullptr && map_row_bytes() == 0) return;
    __syncwarp();
    if (op_.probs != nullptr) {
      copy_out(call_.shared.probs, op_.probs, first, count, static_cast<int>(op_.E) * element_size());
    }
    if (map_row_bytes() > 0) copy_out(call_.shared.map, op_.routing_map, first, count, map_row_bytes());
    __syncwarp();
    if (token < count) {
      for_own_slots<kLanes>(slots(token), lane, [&](int, int expert) { unscatter(token, expert); });
    }
    __syncwarp();
  }

 private:
  __device__ int element_size() const { return op_.logits_dtype == AB_FLOAT32 ? 4 : 2; }
  __device__ int map_row_bytes() const {
    return op_.map_format == MapFormat::bytes  ? static_cast<int>(op_.E)
           : op_.map_format == MapFormat::bits ? static_cast<int>((op_.E + 7) / 8)
                                               : 0;
  }
  __device__ unsigned* bit_word(int token, int expert, unsigned* bit) const {
    const int position = token * map_row_bytes() * 8 + expert;
    *bit = 1u << (position % 32);
    return at<unsigned>(call_.shared.map) + position / 32;
  }

  __device__ void scatter(int token, int expert, float weight) const {
    if (op_.probs != nullptr) {
      store_float(at<char>(call_.shared.probs), op_.logits_dtype, token * op_.E + expert, weight);
    }
    if (op_.map_format == MapFormat::bytes) at<uint8_t>(call_.shared.map)[token * op_.E + expert] = 1;
    if (op_.map_format == MapFormat::bits) {
      unsigned bit;
      unsigned* word = bit_word(token, expert, &bit);
      atomicOr(word, bit);
    }
  }

  __device__ void unscatter(int token, int expert) const {
    if (op_.probs != nullptr) {
      store_float(at<char>(call_.shared.probs), op_.logits_dtype, token * op_.E + expert, 0.0f);
    }
    if (op_.map_format == MapFormat::bytes) at<uint8_t>(call_.shared.map)[token * op_.E + expert] = 0;
    if (op_.map_format == MapFormat::bits) {
      unsigned bit;
      *bit_word(token, expert, &bit) = 0;
    }
  }

  __device__ void store_index(int64_t slot, int expert) const {
    switch (op_.map_dtype) {
      case AB_INT16: static_cast<int16_t*>(op_.routing_map)[slot] = static_cast<int16_t>(expert); break;
      case AB_INT64: static_cast<int64_t*>(op_.routing_map)[slot] = expert; break;
      default: static_cast<int32_t*>(op_.routing_map)[slot] = expert; break;
    }
  }

  __device__ void clear(int offset, int bytes) const {
    for (int i = lane_index() * 4; i < bytes; i += kWarp * 4) *at<uint32_t>(offset + i) = 0;
  }

  // Rows lie one behind another on both sides.
  __device__ void copy_out(int offset, void* to, int64_t first, int count, int row_bytes) const {
    char* out = static_cast<char*>(to) + first * row_bytes;
    const int bytes = count * row_bytes;
    const uintptr_t alignment = reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(bytes);
    if (alignment % 16 == 0) {
      copy_as<uint4>(offset, out, bytes);
    } else if (alignment % 4 == 0) {
      copy_as<uint32_t>(offset, out, bytes);
    } else {
      copy_as<uint8_t>(offset, out, bytes);
    }
  }
  template <class T>
  __device__ void copy_as(int offset, char* out, int bytes) const {
    const T* from = at<T>(offset);
    for (int i = lane_index(); i < bytes / static_cast<int>(sizeof(T)); i += kWarp) reinterpret_cast<T*>(out)[i] = from[i];
  }

  const Call& call_;
  const RouterForward& op_;
  int32_t* counts_;
  char* warp_;
};

// Clears what the block counts in, and brings the bias where `place` says.
template <class PlaceOf>
__device__ void begin_block(const Call& call, char* shared, const PlaceOf& place) {
  if (call.op.tokens_per_expert != nullptr) {
    int32_t* counts = reinterpret_cast<int32_t*>(shared + call.shared.counts);
    for (int e = static_cast<int>(threadIdx.x); e < call.op.E; e += static_cast<int>(blockDim.x)) counts[e] = 0;
  }
  if (call.op.bias != nullptr) {
    float* bias = reinterpret_cast<float*>(shared + call.shared.bias);
    for (int e = static_cast<int>(threadIdx.x); e < call.op.E; e += static_cast<int>(blockDim.x)) {
      bias[place(e)] = load_float(call.op.bias, call.op.bias_dtype, e);
    }
  }
}

// Adds up the warps' sums, which stand in their `keys`, and writes the statistics of the block.
__device__ void end_block(const Call& call, const char* shared) {
  __syncthreads();
  const RouterForward& op = call.op;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * op.E;
  const int32_t* counts = reinterpret_cast<const int32_t*>(shared + call.shared.counts);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
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

__device__ __forceinline__ bool is_masked(const RouterForward& op, int64_t t) {
  return op.token_mask != nullptr && op.token_mask[t] == 0;
}

__device__ __forceinline__ void take_forced(const RouterForward& op, int64_t t, int k, int32_t* expert) {
  const int32_t e = op.forced_experts[t * op.K + k];
  *expert = e >= 0 && e < op.E ? e : -1;
}

template <int kLanes, int kItems, int kList, bool kGrouped>
__global__ void __launch_bounds__(kWarps* kWarp) route(const __grid_constant__ Call call) {
  using PlaceOf = Place<kLanes, kItems>;
  constexpr int kTokens = kWarp / kLanes;
  constexpr int kBiasStride = kItems + 4;  // 16-byte reads of neighbouring lanes fall into different banks
  extern __shared__ char shared[];
  const RouterForward& op = call.op;
  const int E = static_cast<int>(op.E);
  const WarpSlots slots(call, shared);
  const float* bias = reinterpret_cast<const float*>(shared + call.shared.bias);
  begin_block(call, shared, [](int e) { return e / kItems * kBiasStride + e % kItems; });
  slots.clear_dense(kTokens);
  __syncthreads();

  const int lane = lane_index() % kLanes;
  const int token = lane_index() / kLanes;
  const int first_item = lane * kItems;
  const bool is_softmax = op.score_function == AB_SOFTMAX;
  const bool selects = op.wants_selection && !op.forced;
  const bool auxiliary = op.score_sum != nullptr || op.aux_scores != nullptr;
  float sums[kItems] = {};

  const int64_t end = call.tiles.end(blockIdx.x);
  for (int64_t first = call.tiles.begin(blockIdx.x) + warp_index() * kTokens; first < end; first += kWarps * kTokens) {
    const int64_t t = first + token;
    const bool present = t < end;
    const bool live = present && !is_masked(op, t);
    float z[kItems];  // logits; then their powers or scores
    if (live) {
      const char* row = static_cast<const char*>(op.logits) + t * op.E * (op.logits_dtype == AB_FLOAT32 ? 4 : 2);
      load_items(row, op.logits_dtype, call.vectors, first_item, E, -INFINITY, z);
    } else {
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = 0.0f;
    }

    // softmax of the row
    RowSoftmax softmax{0.0f, 1.0f};
    float poison = 0.0f;
    float top = 0.0f;
    const bool powers = is_softmax || op.lse != nullptr;
    if (powers) {
      top = z[0];
#pragma unroll
      for (int i = 1; i < kItems; ++i) top = fmaxf(top, z[i]);
      top = max_lanes<kLanes>(top);
      softmax.shift = top * kLog2E;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (first_item + i < E) sum += softmax.power(z[i]);
      }
      sum = sum_lanes<kLanes>(sum);
      softmax.factor = 1.0f / sum;
      poison = sum - sum;  // NaN where the sum is
      if (op.lse != nullptr && present && lane == 0) op.lse[t] = live ? top + log_f32(sum) : 0.0f;
    }
    const auto score = [&](float logit) {
      return is_softmax ? softmax.power(logit) * softmax.factor : elementwise_score(op.score_function, logit);
    };

    // the K best experts
    if (selects) {
      uint32_t list[kList];
      uint32_t ambiguous = call.only_exact;
      if (!call.only_exact) {
        float best = -INFINITY;  // of the group values of this lane
        float second = -INFINITY;
        float broken = 0.0f;
        const auto q_of = [&](int i) {
          if (!call.selection.by_score) return z[i];
          return z[i] == -INFINITY ? z[i] : score(z[i]) + bias[lane * kBiasStride + i];
        };
        const auto key_of = [&](int i) {
          const float q = q_of(i);
          if constexpr (kGrouped) {
            const float v = call.selection.groups_by_score && !call.selection.by_score ? score(z[i]) : q;
            second = fmaxf(second, fminf(best, v));
            best = fmaxf(best, v);
            broken += v - v;  // NaN where v is infinite or NaN
          }
          const uint32_t key = (ordered_key(q) & ~PlaceOf::kIndexMask) | PlaceOf::of_item(i);
          return first_item + i < E ? key : 0u;
        };
        top_of_items<kItems>(key_of, list);
        bool kept = true;
        if constexpr (kGrouped) {
          // A group is a whole number of lanes; it stays if fewer than group_topk others are better.
          const int group_lanes = kLanes / op.num_groups;
          for (int distance = 1; distance < group_lanes; distance *= 2) {
            const float other_best = __shfl_xor_sync(kAllLanes, best, distance);
            const float other_second = __shfl_xor_sync(kAllLanes, second, distance);
            second = fmaxf(fminf(best, other_best), fmaxf(second, other_second));
            best = fmaxf(best, other_best);
          }
          const float group_score = op.K == op.group_topk ? best : best + second;
          const int group = lane / group_lanes;
          int better = 0;
          for (int other = 0; other < op.num_groups; ++other) {
            const float score_of_other = __shfl_sync(kAllLanes, group_score, token * kLanes + other * group_lanes);
            better += score_of_other > group_score || (score_of_other == group_score && other < group);
          }
          kept = better < op.group_topk;
          ambiguous = sum_lanes<kLanes>(broken) != 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kList; ++i) list[i] = kept ? list[i] | PlaceOf::of_lane(lane) : 0u;
        join_lanes<kLanes>(list);

        uint32_t last = 0;
#pragma unroll
        for (int k = 0; k < kList; ++k) last = k + 1 == op.K ? list[k] : last;
        if (!call.exact_keys) {
          // Equal but for their places: neighbours of the list, or more experts at its end than it holds.
#pragma unroll
          for (int k = 0; k + 1 < kList; ++k) {
            ambiguous |= k + 1 < op.K && (list[k] ^ list[k + 1]) <= PlaceOf::kIndexMask;
          }
          const uint32_t edge = last & ~PlaceOf::kIndexMask;
          int above = 0;
#pragma unroll
          for (int i = 0; i < kItems; ++i) above += first_item + i < E && kept && ordered_key(q_of(i)) >= edge;
          ambiguous |= sum_lanes<kLanes>(above) != op.K;
        }
        if (lane == 0) {
#pragma unroll
          for (int k = 0; k < kList; ++k) {
            if (k < op.K) slots.experts(token)[k] = PlaceOf::expert(list[k]);
          }
        }
      }
      unsigned undecided = __ballot_sync(kAllLanes, live && ambiguous != 0);
      while (undecided != 0) {
        const int other = (__ffs(static_cast<int>(undecided)) - 1) / kLanes;
        const RowSoftmax its_softmax{__shfl_sync(kAllLanes, softmax.shift, other * kLanes),
                                     __shfl_sync(kAllLanes, softmax.factor, other * kLanes)};
        select_exactly(op, call.selection, first + other, its_softmax, slots.scratch(), slots.experts(other));
        undecided &= ~((kLanes == kWarp ? kAllLanes : (1u << (kLanes % kWarp)) - 1u) << (other * kLanes));
      }
      __syncwarp();
      for (int k = lane; k < op.K && !live; k += kLanes) slots.experts(token)[k] = -1;
    } else if (op.forced) {
      for (int k = lane; k < op.K; k += kLanes) {
        slots.experts(token)[k] = -1;
        if (live) take_forced(op, t, k, slots.experts(token) + k);
      }
    }
    if (op.wants_selection) slots.finish<kLanes>(t, token, lane, present, softmax, poison);

    // auxiliary scores
    if (auxiliary) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        z[i] = is_softmax ? softmax.power(z[i]) : elementwise_score(op.score_function, z[i]);
        if (first_item + i < E) total += z[i];
      }
      float factor = is_softmax ? softmax.factor : 1.0f / (sum_lanes<kLanes>(total) + kSumEpsilon);
      if (!live) factor = 0.0f;
#pragma unroll
      for (int i = 0; i < kItems; ++i) sums[i] = fmaf(z[i], factor, sums[i]);
      if (op.aux_scores != nullptr && present) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (first_item + i < E) op.aux_scores[t * op.E + first_item + i] = z[i] * factor;
        }
      }
    }
    if (op.wants_selection) {
      const int64_t left = end - first;
      slots.copy_dense<kLanes>(first, left < kTokens ? static_cast<int>(left) : kTokens, token, lane);
    }
  }

  let_next_kernel_start();
  if (op.score_sum != nullptr) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int distance = kLanes; distance < kWarp; distance *= 2) {
        sums[i] += __shfl_xor_sync(kAllLanes, sums[i], distance);
      }
      if (token == 0 && first_item + i < E) slots.at<float>(call.shared.keys)[first_item + i] = sums[i];
    }
  }
  end_block(call, shared);
}

// A warp a token, for any number of experts that shared memory holds. The keys' place also takes the warp's sums, so
// auxiliary scores are summed into `groups`' neighbour: see lay_out_wide.
__global__ void __launch_bounds__(kWarps* kWarp) route_wide(const __grid_constant__ Call call, int sums_offset) {
  extern __shared__ char shared[];
  const RouterForward& op = call.op;
  const int E = static_cast<int>(op.E);
  const WarpSlots slots(call, shared);
  begin_block(call, shared, [](int e) { return e; });
  slots.clear_dense(1);
  const int lane = lane_index();
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const bool is_softmax = op.score_function == AB_SOFTMAX;
  float* sums = slots.at<float>(sums_offset);
  for (int e = lane; op.score_sum != nullptr && e < E; e += kWarp) sums[e] = 0.0f;
  __syncthreads();

  const int64_t end = call.tiles.end(blockIdx.x);
  for (int64_t t = call.tiles.begin(blockIdx.x) + warp_index(); t < end; t += warps) {
    const bool live = !is_masked(op, t);
    const auto logit = [&](int e) { return load_float(op.logits, op.logits_dtype, t * op.E + e); };
    RowSoftmax softmax{0.0f, 1.0f};
    float poison = 0.0f;
    if (live && (is_softmax || op.lse != nullptr)) {
      float top = -INFINITY;
      for (int e = lane; e < E; e += kWarp) top = fmaxf(top, logit(e));
      top = max_lanes<kWarp>(top);
      softmax.shift = top * kLog2E;
      float sum = 0.0f;
      for (int e = lane; e < E; e += kWarp) sum += softmax.power(logit(e));
      sum = sum_lanes<kWarp>(sum);
      softmax.factor = 1.0f / sum;
      poison = sum - sum;
      if (op.lse != nullptr && lane == 0) op.lse[t] = top + log_f32(sum);
    } else if (op.lse != nullptr && lane == 0) {
      op.lse[t] = 0.0f;
    }
    if (op.wants_selection) {
      if (live && !op.forced) {
        select_exactly(op, call.selection, t, softmax, slots.scratch(), slots.experts(0));
      } else {
        for (int k = lane; k < op.K; k += kWarp) {
          slots.experts(0)[k] = -1;
          if (live) take_forced(op, t, k, slots.experts(0) + k);
        }
      }
      __syncwarp();
      slots.finish<kWarp>(t, 0, lane, true, softmax, poison);
    }
    if (op.score_sum != nullptr || op.aux_scores != nullptr) {
      const auto score = [&](float z) {
        return is_softmax ? softmax.power(z) : elementwise_score(op.score_function, z);
      };
      float factor = softmax.factor;
      if (!is_softmax) {
        float total = 0.0f;
        for (int e = lane; live && e < E; e += kWarp) total += score(logit(e));
        factor = 1.0f / (sum_lanes<kWarp>(total) + kSumEpsilon);
      }
      for (int e = lane; e < E; e += kWarp) {
        const float a = live ? score(logit(e)) * factor : 0.0f;
        if (op.score_sum != nullptr) sums[e] += a;
        if (op.aux_scores != nullptr) op.aux_scores[t * op.E + e] = a;
      }
    }
    if (op.wants_selection) slots.copy_dense<kWarp>(t, 1, 0, lane);
  }

  let_next_kernel_start();
  __syncwarp();
  for (int e = lane; op.score_sum != nullptr && e < E; e += kWarp) slots.at<float>(call.shared.keys)[e] = sums[e];
  end_block(call, shared);
}

// A variant of `route` and what fits it.
struct Variant {
  int lanes;
  int items;
  void (*short_list)(Call);  // K <= 8
  void (*long_list)(Call);   // K <= 16
  void (*grouped)(Call);     // K <= 8
};

template <int kLanes, int kItems>
constexpr Variant variant() {
  return {kLanes, kItems, route<kLanes, kItems, 8, false>, route<kLanes, kItems, 16, false>,
          kLanes == 1 ? nullptr : route<kLanes, kItems, 8, true>};
}

constexpr int kShortList = 8;
constexpr int kLongList = 16;
constexpr int kMostRegisters = 1024;  // experts of a row that registers hold

// By experts, for many tokens; the first that is wide enough.
constexpr Variant kVariants[] = {variant<1, 8>(),   variant<2, 16>(),  variant<4, 16>(),
                                 variant<4, 32>(),  variant<8, 24>(),  variant<8, 32>(),
                                 variant<16, 24>(), variant<16, 32>(), variant<32, 32>()};
// For so few tokens that a warp a token does not fill the device.
constexpr Variant kFewTokens[] = {variant<32, 8>(), variant<32, 16>(), variant<32, 32>()};
constexpr int64_t kFew = 2048;

const Variant& choose_variant(const RouterForward& op) {
  const bool few = op.T <= kFew && op.E > 16;
  const Variant* variant = few ? kFewTokens : kVariants;
  while (variant->lanes * variant->items < op.E) ++variant;
  return *variant;
}

// Whether groups are whole numbers of a variant's lanes, and few enough experts make a group's score.
bool groups_fit(const RouterForward& op, const Variant& v) {
  if (op.K > kShortList || op.K / op.group_topk > 2 || v.grouped == nullptr) return false;
  return v.lanes * v.items == op.E && v.lanes % op.num_groups == 0;
}

// How a checked call is launched.
struct Plan {
  Call call{};
  void (*kernel)(Call) = nullptr;  // nullptr: route_wide
  int warps = kWarps;
  int sums_offset = 0;  // of route_wide
};

ab_status make_plan(const RouterForward& op, void* workspace, Plan* plan, size_t* workspace_bytes) {
  Call& call = plan->call;
  call.op = op;
  call.selection = selection_of(op);
  if (op.E > AB_CUDA_MAX_EXPERTS) {
    return error(AB_UNSUPPORTED, "logits: got %lld experts, expected at most %d on CUDA",
                 static_cast<long long>(op.E), AB_CUDA_MAX_EXPERTS);
  }
  int tokens = 1;
  if (op.E <= kMostRegisters) {
    const Variant& v = choose_variant(op);
    const bool grouped = op.num_groups > 0 && op.wants_selection;
    call.only_exact = op.K > kLongList || (grouped && !groups_fit(op, v));
    plan->kernel = grouped && !call.only_exact ? v.grouped : op.K <= kShortList ? v.short_list : v.long_list;
    call.vectors = rows_are_vectors(op.logits, op.E, dtype_size(op.logits_dtype));
    call.exact_keys = op.logits_dtype != AB_FLOAT32 && !call.selection.by_score;
    call.shared = lay_out_shared(op, v.lanes, v.items, kWarps);
    tokens = kWarp / v.lanes;
  } else {
    constexpr int kSharedBytes = 200 << 10;
    do {
      call.shared = lay_out_shared(op, kWarp, static_cast<int>((op.E + kWarp - 1) / kWarp), plan->warps);
      plan->sums_offset = call.shared.warp;
      call.shared.warp += op.score_sum != nullptr ? (static_cast<int>(op.E) * 4 + 15) / 16 * 16 : 0;
      call.shared.total = call.shared.first_warp + plan->warps * call.shared.warp;
    } while (call.shared.total > kSharedBytes && (plan->warps /= 2) > 0);
    if (plan->warps == 0) {
      return error(AB_UNSUPPORTED, "logits: got %lld experts with topk %d, which shared memory cannot hold on CUDA",
                   static_cast<long long>(op.E), op.K);
    }
  }
  call.tiles = TokenTiles(op.T, op.blocks.sequences, static_cast<int64_t>(plan->warps) * tokens);
  *workspace_bytes =
      place_partials(call.tiles, op.E, op.tokens_per_expert, op.score_sum, workspace, &call.partials);
  return ok();
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_router_forward_workspace(const ab_router_forward_args* args, const ab_exec*, size_t* bytes) {
  RouterForward op;
  AB_RETURN_IF_ERROR(check_router_forward(args, &op));
  cuda::Plan plan;
  return cuda::make_plan(op, nullptr, &plan, bytes);
}

ab_status ab_cuda_router_forward(const ab_router_forward_args* args, const ab_exec* exec) {
  RouterForward op;
  AB_RETURN_IF_ERROR(check_router_forward(args, &op));
  cuda::Plan plan;
  size_t bytes = 0;
  AB_RETURN_IF_ERROR(cuda::make_plan(op, exec == nullptr ? nullptr : exec->workspace, &plan, &bytes));
  AB_RETURN_IF_ERROR(check_workspace(exec, bytes));
  const cudaStream_t stream = cuda::stream_of(exec);
  const cuda::Launch shape{plan.call.tiles.count(), plan.warps * cuda::kWarp,
                           static_cast<size_t>(plan.call.shared.total), stream};
  if (plan.kernel != nullptr) {
    AB_RETURN_IF_ERROR(cuda::launch("router forward", plan.kernel, shape, plan.call));
  } else {
    AB_RETURN_IF_ERROR(cuda::launch("router forward", cuda::route_wide, shape, plan.call, plan.sums_offset));
  }
  return cuda::add_partials(plan.call.tiles, op.E, plan.call.partials, op.tokens_per_expert, op.score_sum, stream);
}

}  // extern "C"
