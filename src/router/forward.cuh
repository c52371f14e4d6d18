// The forward kernel for rows that registers hold.
//
// A warp routes 32 / kLanes neighbouring tokens at a time: kLanes lanes hold the row of a token in registers, kItems
// experts each, find its K best (topk.cuh), and keep sums of the auxiliary scores of their experts over all tokens of
// the block. What depends on the K selected experts alone is done on slots in shared memory, a slot a lane. Dense
// outputs are rows of zeros in shared memory into which slots are scattered; they leave in whole vectors.
#pragma once

#include "balance/statistics.cuh"
#include "core/cuda/warp.cuh"
#include "router/forward.h"
#include "router/row.cuh"
#include "router/select.cuh"
#include "router/topk.cuh"

namespace anabranch::cuda {

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
  int sorted = 0;   // int32 [tokens][K]
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

// A variant of `route` for one score function.
struct RouteVariant {
  int lanes;
  int items;
  void (*short_list)(Call);  // K <= kShortList
  void (*long_list)(Call);   // K <= kLongList
  void (*grouped)(Call);     // K <= kShortList, groups that are whole numbers of lanes; nullptr: none
};

constexpr int kShortList = 8;
constexpr int kLongList = 16;
constexpr int kMostRegisters = 1024;  // experts of a row that registers hold

// By experts, the first that is wide enough: for many tokens, and for so few that a warp a token does not fill the
// device.
struct RouteVariants {
  static constexpr int kMany = 9;
  static constexpr int kFew = 3;
  RouteVariant many[kMany];
  RouteVariant few[kFew];
};
RouteVariants softmax_variants();
RouteVariants sigmoid_variants();
RouteVariants sqrtsoftplus_variants();

namespace {

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

  // Puts the experts of a token into the order of their selection keys, which `q` tells: each goes to its rank.
  template <int kLanes, class Q>
  __device__ void put_in_order(int token, int lane, const Q& q) const {
    const Slots own = slots(token);
    int32_t* sorted = at<int32_t>(call_.shared.sorted) + token * op_.K;
    for_own_slots<kLanes>(own, lane,
                          [&](int k, int expert) { own.values[k] = __uint_as_float(ordered_key(q(expert))); });
    __syncwarp();
    for_own_slots<kLanes>(own, lane, [&](int k, int expert) {
      const uint32_t key = __float_as_uint(own.values[k]);
      int rank = 0;
      for (int other = 0; other < op_.K; ++other) {
        const uint32_t others_key = __float_as_uint(own.values[other]);
        rank += others_key > key || (others_key == key && own.experts[other] < expert);
      }
      sorted[rank] = expert;
    });
    __syncwarp();
    for (int k = lane; k < op_.K; k += kLanes) own.experts[k] = sorted[k];
    __syncwarp();
  }

  // Weights and outputs of the slots of token t, the token-th of the warp, by its kLanes lanes. All lanes of the warp
  // come here; `present`: t is a token of this block. Slots hold experts. At most kSlots a lane stay in registers.
  template <int kScore, int kLanes, int kSlots>
  __device__ __forceinline__ void finish_few(int64_t t, int token, int lane, bool present, const RowSoftmax& softmax,
                                             float poison) const {
    const int32_t* experts_of_token = experts(token);
    int32_t expert[kSlots];
    float value[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int k = lane + s * kLanes;
      expert[s] = k < op_.K ? experts_of_token[k] : -1;
      value[s] = -INFINITY;
      if (expert[s] >= 0 && op_.wants_weights) {
        value[s] = load_float(op_.logits, op_.logits_dtype, t * op_.E + expert[s]);
      }
    }
    if (op_.wants_weights) {
      float shift = softmax.shift;
      float factor = softmax.factor;
      if (kScore == AB_SOFTMAX && op_.normalize) {
        float top = value[0];
#pragma unroll
        for (int s = 1; s < kSlots; ++s) top = fmaxf(top, value[s]);
        shift = max_lanes<kLanes>(top) * kLog2E;
        factor = 1.0f;
      }
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        value[s] = kScore == AB_SOFTMAX ? exp2_flushed_f32(fmaf(value[s], kLog2E, -shift)) * factor
                                        : elementwise_score(kScore, value[s]);
        if (expert[s] >= 0) sum += value[s];
      }
      const float divisor = sum_lanes<kLanes>(sum) + (kScore == AB_SOFTMAX ? poison : kSumEpsilon);
      const float inverse = op_.normalize ? 1.0f / divisor : 1.0f;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) value[s] = expert[s] < 0 ? 0.0f : value[s] * inverse * op_.scaling_factor;
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int k = lane + s * kLanes;
      if (present && k < op_.K) write_slot(t, k, token, expert[s], value[s]);
    }
  }

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
      write_slot(t, k, token, expert, expert < 0 ? 0.0f : own.values[k] * op_.scaling_factor);
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
  __device__ __forceinline__ void write_slot(int64_t t, int k, int token, int expert, float weight) const {
    const int64_t slot = t * op_.K + k;
    if (op_.weights != nullptr) op_.weights[slot] = weight;
    if (op_.experts != nullptr) op_.experts[slot] = expert;
    if (op_.map_format == MapFormat::indices) store_index(slot, expert);
    if (expert < 0) return;
    if (op_.tokens_per_expert != nullptr) atomicAdd(counts_ + expert, 1);
    scatter(token, expert, weight);
  }

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
    for (int i = lane_index(); i < bytes / static_cast<int>(sizeof(T)); i += kWarp)
      reinterpret_cast<T*>(out)[i] = from[i];
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

template <int kScore, int kLanes, int kItems, int kList, bool kGrouped>
__global__ void __launch_bounds__(kWarps* kWarp, kItems > 16 ? 4 : 5) route(const __grid_constant__ Call call) {
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
  constexpr bool kIsSoftmax = kScore == AB_SOFTMAX;
  const bool selects = op.wants_selection && !op.forced;
  const bool auxiliary = op.score_sum != nullptr || op.aux_scores != nullptr;
  // The selection by biased scores leaves the scores where the logits were.
  const bool z_are_scores = !kIsSoftmax && selects && call.selection.by_score && !call.only_exact;
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
    const bool powers = kIsSoftmax || op.lse != nullptr;
    if (powers) {
      top = z[0];
#pragma unroll
      for (int i = 1; i < kItems; ++i) top = fmaxf(top, z[i]);
      top = max_lanes<kLanes>(top);
      softmax.shift = top * kLog2E;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kItems; ++i) sum += softmax.power(z[i]);  // 0 past the last expert
      sum = sum_lanes<kLanes>(sum);
      softmax.factor = 1.0f / sum;
      poison = sum - sum;  // NaN where the sum is
      if (op.lse != nullptr && present && lane == 0) op.lse[t] = live ? top + log_f32(sum) : 0.0f;
    }
    const auto score = [&](float logit) {
      return kIsSoftmax ? softmax.power(logit) * softmax.factor : elementwise_score(kScore, logit);
    };

    // the K best experts
    if (selects) {
      uint32_t list[kList];
      uint32_t undecided_edge = call.only_exact;  // which experts are the K best
      uint32_t undecided_order = 0;               // in which order
      if (!call.only_exact) {
        float best = -INFINITY;  // of the group values of this lane
        float second = -INFINITY;
        float broken = 0.0f;
        const auto key_of = [&](int i) {
          float q = z[i];
          if (call.selection.by_score) {
            const float s = score(z[i]);
            q = z[i] == -INFINITY ? z[i] : s + bias[lane * kBiasStride + i];
            if (!kIsSoftmax) z[i] = s;
          }
          if constexpr (kGrouped) {
            const float v = call.selection.groups_by_score && !call.selection.by_score ? score(z[i]) : q;
            second = fmaxf(second, fminf(best, v));
            best = fmaxf(best, v);
            broken += v - v;  // NaN where v is infinite or NaN
          }
          // Past the last expert q = -inf: behind every expert, since the index is larger.
          return (ordered_key(q) & ~PlaceOf::kIndexMask) | PlaceOf::of_item(i);
        };
        Rest rest{!call.exact_keys, 0};
        top_of_items<kItems>(key_of, list, rest);
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
          undecided_edge = sum_lanes<kLanes>(broken) != 0.0f;
          rest.key = kept ? rest.key : 0u;
        }
#pragma unroll
        for (int i = 0; i < kList; ++i) list[i] = kept ? list[i] | PlaceOf::of_lane(lane) : 0u;
        join_lanes<kLanes>(list, rest);
        if (!call.exact_keys) {
          // Neighbours that are equal but for their places, within the K best or at their edge.
#pragma unroll
          for (int k = 0; k < kList; ++k) {
            const uint32_t next = k + 1 < kList ? list[k + 1] : rest.key;
            const bool same = (list[k] ^ next) <= PlaceOf::kIndexMask;
            undecided_order |= same && k + 1 < op.K;
            undecided_edge |= same && k + 1 == op.K;
          }
        }
        if (lane == 0) {
#pragma unroll
          for (int k = 0; k < kList; ++k) {
            if (k < op.K) slots.experts(token)[k] = PlaceOf::expert(list[k]);
          }
        }
      }
      if (__any_sync(kAllLanes, live && undecided_order != 0 && undecided_edge == 0)) {
        __syncwarp();
        slots.put_in_order<kLanes>(token, lane, [&](int expert) {
          const float logit = live ? load_float(op.logits, op.logits_dtype, t * op.E + expert) : 0.0f;
          return call.selection.by_score ? biased_score(op, softmax, logit, expert) : logit;
        });
      }
      unsigned undecided = __ballot_sync(kAllLanes, live && undecided_edge != 0);
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
    if (op.wants_selection) {
      __syncwarp();
      constexpr int kSlots = (kList + kLanes - 1) / kLanes;
      if (op.K <= kList) {
        slots.finish_few<kScore, kLanes, kSlots>(t, token, lane, present, softmax, poison);
      } else {
        slots.finish<kLanes>(t, token, lane, present, softmax, poison);
      }
    }

    // auxiliary scores
    if (auxiliary) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (kIsSoftmax) {
          z[i] = softmax.power(z[i]);
        } else if (!z_are_scores) {
          z[i] = elementwise_score(kScore, z[i]);
        }
        if (!kIsSoftmax) total += z[i];
      }
      float factor = kIsSoftmax ? softmax.factor : 1.0f / (sum_lanes<kLanes>(total) + kSumEpsilon);
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

template <int kScore, int kLanes, int kItems>
constexpr RouteVariant variant() {
  return {kLanes, kItems, route<kScore, kLanes, kItems, kShortList, false>,
          route<kScore, kLanes, kItems, kLongList, false>,
          kLanes == 1 ? nullptr : route<kScore, kLanes, kItems, kShortList, true>};
}

template <int kScore>
RouteVariants variants() {
  return {{variant<kScore, 1, 8>(), variant<kScore, 2, 16>(), variant<kScore, 4, 16>(), variant<kScore, 8, 16>(),
           variant<kScore, 8, 24>(), variant<kScore, 8, 32>(), variant<kScore, 16, 24>(), variant<kScore, 32, 16>(),
           variant<kScore, 32, 32>()},
          {variant<kScore, 32, 8>(), variant<kScore, 32, 16>(), variant<kScore, 32, 32>()}};
}

}  // namespace
}  // namespace anabranch::cuda
