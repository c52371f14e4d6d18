// The forward kernel for rows that fit in registers.
//
// A warp routes 32 / kLanes consecutive tokens per round. kLanes lanes hold the row of a token in registers, with
// kItems consecutive experts per lane. They select its K best experts, and accumulate the auxiliary scores of their
// experts over all tokens of the warp. Rows pass through shared memory (staged_rows.cuh); the next rows are loaded
// during the current round. The K selected experts of a token are slots in shared memory, distributed over its lanes;
// their outputs are written in whole vectors. Dense outputs are rows of zeros in shared memory to which slots are
// scattered.
#pragma once

#include "balance/statistics.cuh"
#include "core/cuda/dynamic_memory.cuh"
#include "core/cuda/warp.cuh"
#include "router/cuda/block.cuh"
#include "router/cuda/filter.cuh"
#include "router/cuda/group_best.cuh"
#include "router/cuda/instructions.cuh"
#include "router/cuda/logit_size.cuh"
#include "router/cuda/outputs.cuh"
#include "router/cuda/row.cuh"
#include "router/cuda/select.cuh"
#include "router/cuda/staged_rows.cuh"

namespace anabranch::cuda {

// The values by which experts are selected:
//
//   softmax      logits; scores are the softmax
//   elementwise  logits; scores are another function
//   biased       biased scores of any score function
//   balanced     like biased; also writes the threshold of each token
enum class Mode { softmax, elementwise, biased, balanced };

namespace {

// One loop per score function: the branch stays outside the loop.
template <int kItems>
__device__ __forceinline__ void score_items(int32_t score_function, float (&z)[kItems]) {
  if (score_function == AB_SIGMOID) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) z[i] = sigmoid(z[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kItems; ++i) z[i] = sqrtsoftplus(z[i]);
  }
}

// sigmoid by one instruction of the special function unit, tanh, whose relative error is 2^-11. The error of the
// sigmoid is at most kApproxError.
constexpr float kApproxError = 0x1.02p-12f;
__device__ __forceinline__ float approx_sigmoid(float z) { return fmaf(approx_tanh(0.5f * z), 0.5f, 0.5f); }

template <int kItems>
__device__ __forceinline__ float sum_items(const float (&items)[kItems]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) sum += items[i];
  return sum;
}

// selected[k] = the k-th best expert of a row held by one lane, for k < kList. In 32-bit keys the lowest bits of q are
// replaced by the position.
template <int kItems, int kList, class Key>
__device__ __forceinline__ void sort_row(const float (&q)[kItems], const SharedArray<int32_t>& selected) {
  Key list[kList];
  const auto make_key = [&](int i) {
    const auto place = static_cast<uint32_t>(kItems - 1 - i);
    if constexpr (sizeof(Key) == 8) {
      return static_cast<Key>(ordered_bits(q[i])) << 32 | place;
    } else {
      return (ordered_key(q[i]) & ~static_cast<uint32_t>(kItems - 1)) | place;
    }
  };
  sorted_topk<kItems>(make_key, list);
#pragma unroll
  for (unsigned k = 0; k < kList; ++k) selected.set(k, kItems - 1 - static_cast<int32_t>(list[k] & (kItems - 1)));
}

// The tokens of a warp's round, and the state of the lane's token.
struct RoundTokens {
  unsigned first;
  unsigned count;
  unsigned own;  // the lane's token, even if it is past the end
  bool present;
  bool unmasked;  // present and not masked
};

// One lane's part in routing. A round calls these functions from top to bottom. kSize: see logit_size.cuh.
template <Mode kMode, int kSize, int kLanes, int kItems, int kList, bool kGrouped>
struct RowRouter {
  static constexpr bool kBalanced = kMode == Mode::balanced;
  static constexpr bool kBiased = kMode == Mode::biased || kBalanced;
  static constexpr bool kOneLane = kLanes == 1;
  // Chunks are as fine as those of a list of 16. Otherwise the candidates of short lists overflow for a few tokens in
  // 10^5, and each such token delays its block. For lists of 8 on four lanes finer chunks cost as much as they save.
  static constexpr bool kCoarse = kLanes == 4 && kList == 8 && !kGrouped && !kBalanced;
  static constexpr int kFineness = kList < 16 && !kCoarse ? 16 / kList : 1;
  using F = Filter<kLanes, kItems, kList, kFineness>;
  using Rows = StagedRows<kLanes, kItems, kSize>;
  static constexpr unsigned kTokens = kWarp / kLanes;
  static constexpr unsigned kSlots = (kList + kLanes - 1) / kLanes;      // per lane
  static constexpr unsigned kRanks = kOneLane ? kList : F::kCandidates;  // entries per token in `selected`
  static constexpr unsigned kBiasStride = kItems + 4;  // 16-byte reads of adjacent lanes use different banks

  const RouteCall& call;
  const RouterForward& op;
  char* shared;           // shared memory of the block
  unsigned block_memory;  // the address of `shared`
  unsigned memory;        // the address of the warp's part
  unsigned E;
  unsigned K;
  unsigned lane;        // lane within its token
  unsigned token;       // token within its round
  unsigned first_item;  // the lane's first expert
  bool is_softmax;
  bool exact_keys;        // 32-bit keys hold the whole value and the expert
  bool selects;           // whether the kernel selects experts itself
  bool auxiliary;         // auxiliary scores are requested
  bool groups_by_score;   // groups are ranked by score, without a bias
  bool words_are_logits;  // the filter's bfloat16 words are the logits themselves
  Outputs outputs;

  // The selection values q, saved while the row's registers are converted to scores.
  struct Keys {
    F filter;
    typename F::Maxima maxima;
    GroupBest group;
  };

  __device__ __forceinline__ RowRouter(const RouteCall& route_call, char* block_shared)
      : call(route_call),
        op(route_call.op),
        shared(block_shared),
        block_memory(static_cast<unsigned>(__cvta_generic_to_shared(block_shared))),
        memory(keep_in_register(block_memory + call.shared.first_warp + warp_index() * call.shared.warp)),
        E(static_cast<unsigned>(op.E)),
        K(static_cast<unsigned>(op.K)),
        lane(threadIdx.x % kLanes),
        token(threadIdx.x % kWarp / kLanes),
        first_item(keep_in_register(lane * kItems)),
        is_softmax(kMode == Mode::softmax || (kBiased && op.score_function == AB_SOFTMAX)),
        exact_keys(!kBiased && (kSize == 0 ? op.logits_dtype != AB_FLOAT32 : kSize == 2)),
        selects(kBiased || (op.needs_selection && !op.forced)),
        auxiliary(op.score_sum != nullptr || op.aux_scores != nullptr),
        groups_by_score(kGrouped && !kBiased && call.selection.groups_by_score),
        words_are_logits(!kOneLane && !kBiased && kSize != 4 && selects && op.logits_dtype == AB_BFLOAT16),
        outputs{op, SharedArray<int32_t>(memory + call.shared.experts), SharedArray<float>(memory + call.shared.values),
                0, memory + call.shared.map} {}

  // Whether the filter may use values with an error of kApproxError. This requires that only the scores of selected
  // experts are requested. With a list of 8 the candidates would overflow for too many tokens.
  __device__ __forceinline__ bool is_approx() const {
    return kBiased && !kGrouped && kList > 8 && op.score_function == AB_SIGMOID && !auxiliary;
  }

  // The position of an expert's bias.
  static __device__ __forceinline__ unsigned bias_place(unsigned expert) {
    return expert / kItems * kBiasStride + expert % kItems;
  }
  __device__ __forceinline__ SharedArray<float> bias() const {
    return SharedArray<float>(block_memory + call.shared.bias);
  }
  // The experts of the lane's token by rank.
  __device__ __forceinline__ SharedArray<int32_t> selected() const {
    return SharedArray<int32_t>(memory + call.shared.selected + token * kRanks * 4);
  }
  // Calls `each` for the sums of the scores of the lane's experts over its tokens. They are in shared memory, because
  // registers are scarce.
  template <class Each>
  __device__ __forceinline__ void for_sums(const Each& each) const {
    for_chunks<kItems / 4>(memory + call.shared.sums, lane_index(), [&](unsigned i, unsigned at) { each(i * 4, at); });
  }
  __device__ __forceinline__ void clear_sums() const {
    if (op.score_sum != nullptr) for_sums([](unsigned, unsigned at) { store_shared(at, float4{}); });
  }

  // z: the lane's logits, or zeros for a token that is masked or past the end.
  __device__ __forceinline__ void read_row(const Rows& rows, const RoundTokens& tokens, float (&z)[kItems]) const {
    rows.read(first_item, z);
    if (__any_sync(kAllLanes, !tokens.unmasked)) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = tokens.unmasked ? z[i] : 0.0f;
    }
  }

  // Saves the values q of the row. A lane that holds a whole row sorts them immediately.
  __device__ __forceinline__ void save_keys(const float (&q)[kItems], Keys& keys) const {
    if constexpr (kOneLane) {
      if (exact_keys) {
        sort_row<kItems, kList, uint32_t>(q, selected());
      } else {
        sort_row<kItems, kList, uint64_t>(q, selected());
      }
    } else {
#pragma unroll
      for (int w = 0; w < F::kWords; ++w) keys.filter.words[w] = __floats2bfloat162_rn(q[w], q[w + F::kWords]);
      keys.maxima = keys.filter.maxima();
    }
  }

  // Computes the softmax of the row, and lse. Without a bias it replaces z by exponentials. The factor is NaN if the
  // row contains NaN or infinity.
  __device__ __forceinline__ RowSoftmax compute_softmax(const RoundTokens& tokens, const Keys& keys,
                                                        float (&z)[kItems]) const {
    float top = z[0];
    if (words_are_logits) {
      top = fmaxf(__low2float(keys.maxima.all), __high2float(keys.maxima.all));
    } else {
#pragma unroll
      for (int i = 1; i < kItems; ++i) top = fmaxf(top, z[i]);
    }
    top = max_lanes<kLanes>(top);
    RowSoftmax softmax{top * kLog2E, 1.0f};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const float power = softmax.power(z[i]);  // 0 past the last expert
      if (!kBiased && is_softmax) z[i] = power;
      sum += power;
    }
    sum = sum_lanes<kLanes>(sum);
    softmax.factor = reciprocal(sum);
    if (op.lse != nullptr && tokens.present && lane == 0)
      op.lse[tokens.own] = tokens.unmasked ? top + log_f32(sum) : 0.0f;
    return softmax;
  }

  // Converts logits to scores (for softmax, up to its factor) and to q, the biased scores.
  __device__ __forceinline__ void compute_biased_scores(const RowSoftmax& softmax, float (&z)[kItems],
                                                        Keys& keys) const {
    // q = -inf where z = -inf: bits of `never`, computed only if the sum of the row shows that there may be some.
    const bool any_never = __any_sync(kAllLanes, !(sum_items(z) > -INFINITY));
    typename F::Mask never = 0;
    if (any_never) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) never |= static_cast<typename F::Mask>(z[i] == -INFINITY) << i;
    }
    if (is_softmax) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = softmax.power(z[i]);
    } else if (is_approx()) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = approx_sigmoid(z[i]);
    } else {
      score_items(op.score_function, z);
    }
    const float factor = score_factor(softmax);
    float q[kItems];
#pragma unroll
    for (int i = 0; i < kItems; i += 4) {
      const auto b = load_shared<float4>(bias().from(lane * kBiasStride + i).address());
      q[i] = fmaf(z[i], factor, b.x);
      q[i + 1] = fmaf(z[i + 1], factor, b.y);
      q[i + 2] = fmaf(z[i + 2], factor, b.z);
      q[i + 3] = fmaf(z[i + 3], factor, b.w);
    }
    if (any_never) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) q[i] = (never >> i & 1) != 0 ? -INFINITY : q[i];
    }
    save_keys(q, keys);
    if constexpr (kGrouped) keys.group.add_all(q);
  }

  // Converts logits to scores without a bias: q are the logits, which are already saved.
  __device__ __forceinline__ void compute_scores(const RowSoftmax& softmax, float (&z)[kItems], Keys& keys) const {
    if constexpr (kMode != Mode::softmax) {
      if (!is_softmax) score_items(op.score_function, z);
    }
    if (groups_by_score) {
      const float factor = score_factor(softmax);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const float s = z[i] * factor;
        keys.group.add(s == 0.0f ? -INFINITY : s);  // 0 may result from -inf
      }
    }
  }

  // The factor that converts exponentials, or scores, to scores.
  __device__ __forceinline__ float score_factor(const RowSoftmax& softmax) const {
    return is_softmax ? softmax.factor : 1.0f;
  }

  // Adds the auxiliary scores to their sums, and writes them if requested.
  __device__ __forceinline__ void add_scores(const RoundTokens& tokens, const RowSoftmax& softmax,
                                             const float (&z)[kItems]) const {
    float factor = softmax.factor;
    if (!is_softmax) factor = reciprocal(sum_lanes<kLanes>(sum_items(z)) + kSumEpsilon);  // 0 past the last expert
    if (!tokens.unmasked) factor = 0.0f;
    if (op.score_sum != nullptr) {
      for_sums([&](unsigned i, unsigned at) {
        auto sum = load_shared<float4>(at);
        sum.x = fmaf(z[i], factor, sum.x);
        sum.y = fmaf(z[i + 1], factor, sum.y);
        sum.z = fmaf(z[i + 2], factor, sum.z);
        sum.w = fmaf(z[i + 3], factor, sum.w);
        store_shared(at, sum);
      });
    }
    if (op.aux_scores != nullptr && tokens.present) {
      float* const row = op.aux_scores + static_cast<size_t>(tokens.own) * E + first_item;
#pragma unroll
      for (unsigned i = 0; i < kItems; ++i) {
        if (first_item + i < E) row[i] = z[i] * factor;
      }
    }
  }

  // q of an expert of the lane's token.
  __device__ __forceinline__ float get_value(const Rows& rows, const RowSoftmax& softmax, unsigned expert) const {
    const float logit = rows.logit(token, expert);
    if constexpr (!kBiased) return logit;
    const float s = is_softmax ? softmax.power(logit) : elementwise_score(op.score_function, logit);
    const float q = fmaf(s, score_factor(softmax), bias()[bias_place(expert)]);
    return logit == -INFINITY ? logit : q;
  }

  // Selects the K best experts with the filter. Returns whether the result is undecided.
  __device__ __forceinline__ bool filter_experts(const Rows& rows, const RoundTokens& tokens, const RowSoftmax& softmax,
                                                 Keys& keys) const {
    bool undecided = !__hbeq2(keys.maxima.all, keys.maxima.all);  // NaN
    bool is_selected = tokens.unmasked;
    if constexpr (kGrouped) {
      is_selected = keys.group.template is_selected<kLanes>(op, static_cast<int>(lane)) && tokens.unmasked;
      undecided |= keys.group.nan_or_zero != 0.0f;
      if (!is_selected) {
#pragma unroll
        for (int w = 0; w < F::kMaxima; ++w) keys.maxima.words[w] = __float2bfloat162_rn(-INFINITY);
      }
    }
    __nv_bfloat162 threshold = F::template threshold<kBalanced>(keys.maxima.words, lane);
    if (is_approx()) {
      // A selected value may be lower by twice the approximation error than a value that rounds up to the threshold
      // from 2^-8 of it below.
      const float q = __low2float(threshold);
      threshold = __float2bfloat162_rn(q - fminf(0.00391f * fabsf(q), 0x1p127f) - 2.0f * kApproxError);
    }
    typename F::Mask reached = keys.filter.reached(threshold);
    if (!is_selected) reached = 0;
    if (first_item + kItems > E) {
      reached &= first_item < E ? (typename F::Mask{1} << (E - first_item)) - 1 : typename F::Mask{0};
    }
    const SharedArray<uint16_t> list(memory + call.shared.list + token * F::kCandidates * 2);
    const SharedArray<float> values(memory + call.shared.candidates + token * F::kCandidates * 4);
    const unsigned candidates = F::collect(reached, first_item, lane, list);
    undecided |= candidates > F::kCandidates;
    __syncwarp();
    const unsigned listed = min(candidates, unsigned{F::kCandidates});
    const auto get_q = [&](unsigned expert) { return get_value(rows, softmax, expert); };
    if (exact_keys) {
      F::sort_exactly(list, listed, lane, get_q, selected());
    } else {
      const float least = __low2float(threshold) - (is_approx() ? 2.0f * kApproxError : 0.0f);
      undecided |= F::sort_approximately(list, listed, lane, least, values, get_q, selected());
    }
    return undecided;
  }

  // The whole warp selects for each of its undecided tokens in turn.
  __device__ __forceinline__ void select_undecided(const RoundTokens& tokens, const RowSoftmax& softmax,
                                                   bool undecided) const {
    constexpr unsigned kFirstTokenLanes = kLanes == kWarp ? kAllLanes : (1u << (kLanes % kWarp)) - 1u;
    unsigned pending = __ballot_sync(kAllLanes, tokens.unmasked && undecided);
#pragma unroll 1
    while (pending != 0) {
      const unsigned other = (__ffs(static_cast<int>(pending)) - 1) / kLanes;
      const RowSoftmax token_softmax{__shfl_sync(kAllLanes, softmax.shift, other * kLanes),
                                     __shfl_sync(kAllLanes, softmax.factor, other * kLanes)};
      char* const piece = shared + (memory - block_memory);
      const SelectionScratch scratch{reinterpret_cast<uint32_t*>(piece + call.shared.keys),
                                     reinterpret_cast<uint32_t*>(piece + call.shared.groups)};
      select_exactly(op, call.selection, tokens.first + other, token_softmax, scratch,
                     reinterpret_cast<int32_t*>(piece + call.shared.selected) + other * kRanks);
      pending &= ~(kFirstTokenLanes << (other * kLanes));
    }
  }

  // Writes the selection to `selected`: the best experts, or the given ones.
  __device__ __forceinline__ void select(const Rows& rows, const RoundTokens& tokens, const RowSoftmax& softmax,
                                         Keys& keys) const {
    if (selects) {
      bool undecided = call.always_exact;
      if constexpr (!kOneLane) undecided |= filter_experts(rows, tokens, softmax, keys);
      select_undecided(tokens, softmax, undecided);
      if constexpr (kBalanced) {
        __syncwarp();
        const float threshold = tokens.unmasked ? get_value(rows, softmax, static_cast<unsigned>(selected()[K])) : NAN;
        if (tokens.present && lane == 0) call.scales[tokens.own] = {threshold, softmax.shift, softmax.factor};
      }
    } else if (op.forced) {
#pragma unroll 1
      for (unsigned k = lane; k < K; k += kLanes) {
        selected().set(k, tokens.unmasked ? forced_expert(op, tokens.own, k) : -1);
      }
    }
  }

  // Loads the experts of the lane's slots and counts them.
  __device__ __forceinline__ void load_slot_experts(const RoundTokens& tokens, int32_t (&expert)[kSlots]) const {
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      const unsigned k = lane + s * kLanes;
      const int32_t e = selected()[min(k, kRanks - 1)];
      expert[s] = tokens.unmasked && k < K ? e : -1;
      outputs.experts.set_if(k < K, token * K + k, expert[s]);
    }
    if (op.tokens_per_expert != nullptr) {
      const SharedArray<uint32_t> counts(block_memory + call.shared.counts);
#pragma unroll
      for (unsigned s = 0; s < kSlots; ++s) counts.count_if(expert[s] >= 0, static_cast<unsigned>(expert[s]));
    }
  }

  __device__ __forceinline__ void weigh(const Rows& rows, const RowSoftmax& softmax, const int32_t (&expert)[kSlots],
                                        float (&weight)[kSlots]) const {
    const float nan_or_zero = softmax.factor - softmax.factor;  // NaN or 0
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      const float logit = rows.logit(token, static_cast<unsigned>(max(expert[s], 0)));
      weight[s] = expert[s] < 0 ? -INFINITY : logit;
    }
    if (is_softmax) {
      weigh_slots<AB_SOFTMAX, kLanes>(AB_SOFTMAX, op.normalize, softmax, nan_or_zero, expert, weight);
    } else {
      weigh_slots<AB_SIGMOID, kLanes>(op.score_function, op.normalize, softmax, nan_or_zero, expert, weight);
    }
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      const unsigned k = lane + s * kLanes;
      weight[s] *= op.scaling_factor;
      outputs.weights.set_if(k < K, token * K + k, weight[s]);
    }
  }

  // Writes the outputs of the slots. Dense probabilities overwrite the logits.
  __device__ __forceinline__ void write(const Rows& rows, const RoundTokens& tokens, const int32_t (&expert)[kSlots],
                                        const float (&weight)[kSlots]) {
    // A full round has all tokens, and their rows fill the staged rows exactly.
    const bool full = E == kLanes * kItems && call.rows_are_aligned && call.dense_is_aligned && tokens.count == kTokens;
    if (op.probs != nullptr) {
      outputs.probs = rows.address();
      __syncwarp();  // before the logits are overwritten
      if (full) {
        rows.clear();
      } else {
        outputs.clear_probs(tokens.count);
      }
    }
    __syncwarp();
    outputs.write_slots(tokens.first, tokens.count);
    if (op.probs != nullptr || outputs.has_map()) write_dense(full, tokens, expert, weight);
  }

  // Adds the lanes' sums to the warp's sums, where end_block expects them. The lanes' sums are rows of
  // [tokens][experts]; a lane adds chunks of columns.
  __device__ __forceinline__ void finish_sums() const {
    if (op.score_sum == nullptr) return;
    __syncwarp();
    const unsigned lane_sums = memory + call.shared.sums;
    constexpr unsigned kChunkFloats = kChunk / sizeof(float);
    constexpr unsigned kRowChunks = kLanes * kItems / kChunkFloats;
#pragma unroll 1
    for (unsigned chunk = lane_index(); chunk * kChunkFloats < E; chunk += kWarp) {
      float4 sum{};
#pragma unroll
      for (unsigned row = 0; row < kTokens; ++row) {
        const auto row_sum = load_shared<float4>(lane_sums + chunk_place(row * kRowChunks + chunk) * kChunk);
        sum = add(sum, row_sum);
      }
      store_shared(memory + call.shared.keys + chunk * kChunk, sum);
    }
  }

  // Processes a round whose logits have arrived.
  __device__ __forceinline__ void route_tokens(const Rows& rows, const RoundTokens& tokens) {
    float z[kItems];  // logits; later exponentials or scores
    Keys keys;
    RowSoftmax softmax{0.0f, 1.0f};
    read_row(rows, tokens, z);
    if (!kBiased && selects) {
      save_keys(z, keys);
      if (kGrouped && !groups_by_score) keys.group.add_all(z);
    }
    if (is_softmax || op.lse != nullptr) softmax = compute_softmax(tokens, keys, z);
    if constexpr (kBiased) {
      compute_biased_scores(softmax, z, keys);
    } else if (auxiliary || groups_by_score) {
      compute_scores(softmax, z, keys);
    }
    if (auxiliary) add_scores(tokens, softmax, z);
    select(rows, tokens, softmax, keys);
    if (op.needs_selection) {
      __syncwarp();
      int32_t expert[kSlots];
      float weight[kSlots];
      load_slot_experts(tokens, expert);
      if (op.needs_weights) weigh(rows, softmax, expert, weight);
      write(rows, tokens, expert, weight);
    }
    __syncwarp();
  }

 private:
  // Calls f(slot, expert) for the lane's slots that have an expert.
  template <class F>
  static __device__ __forceinline__ void for_experts(const int32_t (&expert)[kSlots], const F& f) {
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      if (expert[s] >= 0) f(s, static_cast<unsigned>(expert[s]));
    }
  }

  // Writes dense rows of the slots. full: each lane copies whole 16-byte chunks.
  __device__ __forceinline__ void write_dense(bool full, const RoundTokens& tokens, const int32_t (&expert)[kSlots],
                                              const float (&weight)[kSlots]) const {
    if (op.probs != nullptr) {
      for_experts(expert, [&](unsigned s, unsigned e) { outputs.scatter_weight(token, e, weight[s]); });
    }
    if (outputs.has_map()) {
      for_experts(expert, [&](unsigned, unsigned e) { outputs.mark(token, e); });
    }
    __syncwarp();
    if (op.probs != nullptr) {
      if (full && (kSize == 0 ? outputs.element_size() : kSize) == 4) {
        copy_chunks_out<kItems / 4>(outputs.probs, outputs.probs_row(tokens.first));
      } else if (full) {
        copy_chunks_out<kItems / 8>(outputs.probs, outputs.probs_row(tokens.first));
      } else {
        outputs.write_probs(tokens.first, tokens.count);
      }
    }
    if (outputs.has_map()) {
      constexpr unsigned kMapChunks = kItems % 16 == 0 ? kItems / 16 : 0;
      const bool whole_chunks = kMapChunks > 0 && full && op.map_format == MapFormat::bytes;
      if constexpr (kMapChunks > 0) {
        if (whole_chunks) copy_chunks_out<kMapChunks>(outputs.map, outputs.map_row(tokens.first));
      }
      if (!whole_chunks) outputs.write_map(tokens.first, tokens.count);
      __syncwarp();
      for_experts(expert, [&](unsigned, unsigned e) { outputs.unmark(token, e); });
    }
  }
};

// Blocks per SM. With one token per warp and short rows one more block, with fewer registers per thread, is faster for
// few tokens and their statistics (measured).
template <int kLanes, int kItems>
constexpr int kBlocksPerSm = kLanes == kWarp && kItems <= 16 ? kBlocks + 1 : kBlocks;

// What a block of `route` does.
template <Mode kMode, int kSize, int kLanes, int kItems, int kList, bool kGrouped>
__device__ __forceinline__ void route_block(const RouteCall& call) {
  using Router = RowRouter<kMode, kSize, kLanes, kItems, kList, kGrouped>;
  using Rows = typename Router::Rows;
  constexpr unsigned kTokens = Router::kTokens;
  char* const shared = dynamic_shared_array<char>();
  const RouterForward& op = call.op;
  let_next_kernel_start();
  // Work that does not depend on the previous kernel overlaps with it.
  clear_counts(call, shared);
  Router router(call, shared);
  router.outputs.clear_map(kTokens);
  router.clear_sums();
  const unsigned step = blockDim.x / kLanes;  // tokens per round of the block
  const auto end = static_cast<unsigned>(call.tiles.end(blockIdx.x));
  unsigned first = static_cast<unsigned>(call.tiles.begin(blockIdx.x)) + warp_index() * kTokens;  // of the warp
  const Rows rows(router.memory + call.shared.rows, router.E, call.rows_are_aligned, op.logits_dtype);
  unsigned present = rows.address();  // addresses of the rows of this round and of the next round
  unsigned next = present + rows.bytes();
  const auto logits_at = [&](unsigned token) {
    return static_cast<const char*>(op.logits) + static_cast<uint64_t>(token) * (router.E * rows.element_size());
  };
  BiasReader bias(op);
  wait_for_previous_kernel();
  bias.read();
  if (first < end) rows.start(logits_at(first), min(end - first, kTokens));
  bias.store(reinterpret_cast<float*>(shared + call.shared.bias), Router::bias_place);
  if constexpr (Router::kBalanced) clear_histogram(op);
  __syncthreads();

#pragma unroll 1
  for (; first < end; first += step) {
    RoundTokens tokens;
    tokens.first = first;
    tokens.count = min(end - first, kTokens);
    tokens.own = tokens.first + router.token;
    tokens.present = router.token < tokens.count;
    tokens.unmasked = tokens.present && (op.token_mask == nullptr || op.token_mask[tokens.own] != 0);
    if (first + step < end) {
      rows.at(next).start(logits_at(first + step), min(end - first - step, kTokens));
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncwarp();
    router.route_tokens(rows.at(present), tokens);
    const unsigned used = present;
    present = next;
    next = used;
  }
  router.finish_sums();
  end_block(call, shared);
}

template <Mode kMode, int kSize, int kLanes, int kItems, int kList, bool kGrouped>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kBlocksPerSm<kLanes, kItems>)
    route(const __grid_constant__ RouteCall call) {
  if constexpr (kMode == Mode::softmax && !has_logit_size<kSize>()) {
    fail_without_code();
  } else {
    route_block<kMode, kSize, kLanes, kItems, kList, kGrouped>(call);
  }
}

}  // namespace
}  // namespace anabranch::cuda
