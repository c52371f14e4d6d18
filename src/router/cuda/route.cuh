// The forward kernel for rows that registers hold.
//
// A warp routes 32 / kLanes neighbouring tokens at a time: kLanes lanes hold the row of a token in registers, kItems
// neighbouring experts each, find its K best, and keep sums of the auxiliary scores of their experts over all tokens of
// the warp. Rows come through shared memory (staged_rows.cuh), the next ones while the present ones are worked on. The
// K selected experts of a token are slots in shared memory, dealt out to its lanes; their outputs leave in whole
// vectors. Dense outputs are rows of zeros in shared memory into which slots are scattered.
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

// What experts are selected by. softmax and elementwise: by logits, of which softmax or another function makes scores.
// biased: by scores with a bias, whatever the function. balanced: as biased, and cutoffs are written.
enum class Mode { softmax, elementwise, biased, balanced };

namespace {

// Scores of all items, one loop for each function.
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

// sigmoid by one instruction of the special function unit, off by kRoughness at most: tanh is by 2^-11 of its value.
constexpr float kRoughness = 0x1.02p-12f;
__device__ __forceinline__ float rough_sigmoid(float z) { return fmaf(rough_tanh(0.5f * z), 0.5f, 0.5f); }

template <int kItems>
__device__ __forceinline__ float sum_items(const float (&items)[kItems]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) sum += items[i];
  return sum;
}

// selected[k] = the k-th best of a row that one lane holds, for k < kList. Keys of 32 bits give places the lowest bits
// of q.
template <int kItems, int kList, class Key>
__device__ __forceinline__ void sort_row(const float (&q)[kItems], const SharedArray<int32_t>& selected) {
  Key list[kList];
  const auto key_of = [&](int i) {
    const auto place = static_cast<uint32_t>(kItems - 1 - i);
    if constexpr (sizeof(Key) == 8) {
      return static_cast<Key>(ordered_bits(q[i])) << 32 | place;
    } else {
      return (ordered_key(q[i]) & ~static_cast<uint32_t>(kItems - 1)) | place;
    }
  };
  top_of_items<kItems>(key_of, list);
#pragma unroll
  for (unsigned k = 0; k < kList; ++k) selected.set(k, kItems - 1 - static_cast<int32_t>(list[k] & (kItems - 1)));
}

// The tokens of a warp's round; which one is the lane's, and what is known of it.
struct RoundTokens {
  unsigned first;
  unsigned count;
  unsigned own;  // present or not
  bool present;
  bool live;  // and not masked
};

// One lane's part in routing. A round goes through these functions from top to bottom; kSize: logit_size.cuh.
template <Mode kMode, int kSize, int kLanes, int kItems, int kList, bool kGrouped>
struct RowRouter {
  static constexpr bool kBalanced = kMode == Mode::balanced;
  static constexpr bool kBiased = kMode == Mode::biased || kBalanced;
  static constexpr bool kOneLane = kLanes == 1;
  // Chunks of the row are as fine as those of a list of 16: else short lists run over for some tokens in 10^5, each of
  // which keeps its block waiting. For lists of 8 on four lanes that costs as much as it saves.
  static constexpr bool kCoarse = kLanes == 4 && kList == 8 && !kGrouped && !kBalanced;
  static constexpr int kFineness = kList < 16 && !kCoarse ? 16 / kList : 1;
  using F = Filter<kLanes, kItems, kList, kFineness>;
  using Rows = StagedRows<kLanes, kItems, kSize>;
  static constexpr unsigned kTokens = kWarp / kLanes;
  static constexpr unsigned kSlots = (kList + kLanes - 1) / kLanes;      // of a lane
  static constexpr unsigned kRanks = kOneLane ? kList : F::kCandidates;  // of a token in `selected`
  static constexpr unsigned kBiasStride = kItems + 4;  // 16-byte reads of neighbouring lanes fall into different banks

  const RouteCall& call;
  const RouterForward& op;
  char* shared;           // of the block
  unsigned block_memory;  // the same as an address
  unsigned memory;        // of the warp
  unsigned E;
  unsigned K;
  unsigned lane;        // of its token
  unsigned token;       // of its round
  unsigned first_item;  // an expert
  bool is_softmax;
  bool exact_keys;        // of 32 bits: they hold value and expert
  bool selects;           // itself
  bool auxiliary;         // scores are wanted
  bool groups_by_score;   // without a bias
  bool words_are_logits;  // bfloat16 words of the filter are the logits themselves
  Outputs outputs;

  // The values q that select, as they are kept while a row's registers become scores.
  struct Keys {
    F filter;
    typename F::Maxima maxima;
    GroupBest group;
  };

  __device__ __forceinline__ RowRouter(const RouteCall& of, char* block_shared)
      : call(of),
        op(of.op),
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
        selects(kBiased || (op.wants_selection && !op.forced)),
        auxiliary(op.score_sum != nullptr || op.aux_scores != nullptr),
        groups_by_score(kGrouped && !kBiased && call.selection.groups_by_score),
        words_are_logits(!kOneLane && !kBiased && kSize != 4 && selects && op.logits_dtype == AB_BFLOAT16),
        outputs{op, SharedArray<int32_t>(memory + call.shared.experts), SharedArray<float>(memory + call.shared.values),
                0, memory + call.shared.map} {}

  // Whether the filter's values are off by kRoughness: scores of selected experts alone are wanted. A list of 8 would
  // run over for too many tokens.
  __device__ __forceinline__ bool is_rough() const {
    return kBiased && !kGrouped && kList > 8 && op.score_function == AB_SIGMOID && !auxiliary;
  }

  // Where the bias of an expert stands.
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
  // Sums of the scores of the lane's experts over its tokens, in shared memory: registers are scarce.
  template <class Each>
  __device__ __forceinline__ void for_sums(const Each& each) const {
    for_chunks<kItems / 4>(memory + call.shared.sums, lane_index(), [&](unsigned i, unsigned at) { each(i * 4, at); });
  }
  __device__ __forceinline__ void clear_sums() const {
    if (op.score_sum != nullptr) for_sums([](unsigned, unsigned at) { store_shared(at, float4{}); });
  }

  // z: the lane's logits, zeros of a token that is not there.
  __device__ __forceinline__ void read_row(const Rows& rows, const RoundTokens& tokens, float (&z)[kItems]) const {
    rows.read(first_item, z);
    if (__any_sync(kAllLanes, !tokens.live)) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = tokens.live ? z[i] : 0.0f;
    }
  }

  // Takes the values q of the row. A lane that has the row to itself sorts them at once.
  __device__ __forceinline__ void take_keys(const float (&q)[kItems], Keys& keys) const {
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

  // softmax of the row, and lse. Without a bias z become powers. The factor is NaN if the row is broken.
  __device__ __forceinline__ RowSoftmax softmax_of_row(const RoundTokens& tokens, const Keys& keys,
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
    if (op.lse != nullptr && tokens.present && lane == 0) op.lse[tokens.own] = tokens.live ? top + log_f32(sum) : 0.0f;
    return softmax;
  }

  // From logits to scores, which for softmax still want its factor, and to q, scores with a bias.
  __device__ __forceinline__ void take_biased_scores(const RowSoftmax& softmax, float (&z)[kItems], Keys& keys) const {
    // q = -inf where z is: bits of `never`, looked for only where the sum of the row tells that there may be some.
    const bool any_never = __any_sync(kAllLanes, !(sum_items(z) > -INFINITY));
    typename F::Mask never = 0;
    if (any_never) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) never |= static_cast<typename F::Mask>(z[i] == -INFINITY) << i;
    }
    if (is_softmax) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = softmax.power(z[i]);
    } else if (is_rough()) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = rough_sigmoid(z[i]);
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
    take_keys(q, keys);
    if constexpr (kGrouped) keys.group.take_all(q);
  }

  // The same without a bias: q are the logits, which have been taken.
  __device__ __forceinline__ void take_scores(const RowSoftmax& softmax, float (&z)[kItems], Keys& keys) const {
    if constexpr (kMode != Mode::softmax) {
      if (!is_softmax) score_items(op.score_function, z);
    }
    if (groups_by_score) {
      const float factor = score_factor(softmax);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const float s = z[i] * factor;
        keys.group.take(s == 0.0f ? -INFINITY : s);  // 0 may stand for -inf
      }
    }
  }

  // What makes scores of powers, or of scores.
  __device__ __forceinline__ float score_factor(const RowSoftmax& softmax) const {
    return is_softmax ? softmax.factor : 1.0f;
  }

  // Auxiliary scores: their sums, and where they are wanted, they themselves.
  __device__ __forceinline__ void add_scores(const RoundTokens& tokens, const RowSoftmax& softmax,
                                             const float (&z)[kItems]) const {
    float factor = softmax.factor;
    if (!is_softmax) factor = reciprocal(sum_lanes<kLanes>(sum_items(z)) + kSumEpsilon);  // 0 past the last expert
    if (!tokens.live) factor = 0.0f;
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
  __device__ __forceinline__ float value_of(const Rows& rows, const RowSoftmax& softmax, unsigned expert) const {
    const float logit = rows.logit(token, expert);
    if constexpr (!kBiased) return logit;
    const float s = is_softmax ? softmax.power(logit) : elementwise_score(op.score_function, logit);
    const float q = fmaf(s, score_factor(softmax), bias()[bias_place(expert)]);
    return logit == -INFINITY ? logit : q;
  }

  // The K best experts by the filter. Returns whether it could not decide.
  __device__ __forceinline__ bool filter_experts(const Rows& rows, const RoundTokens& tokens, const RowSoftmax& softmax,
                                                 Keys& keys) const {
    bool undecided = !__hbeq2(keys.maxima.all, keys.maxima.all);  // NaN
    bool kept = tokens.live;
    if constexpr (kGrouped) {
      kept = keys.group.template is_kept<kLanes>(op, static_cast<int>(lane)) && tokens.live;
      undecided |= keys.group.broken != 0.0f;
      if (!kept) {
#pragma unroll
        for (int w = 0; w < F::kMaxima; ++w) keys.maxima.words[w] = __float2bfloat162_rn(-INFINITY);
      }
    }
    __nv_bfloat162 threshold = F::template threshold<kBalanced>(keys.maxima.words, lane);
    if (is_rough()) {
      // What is selected may be lower by twice the roughness than what rounds up to the threshold, 2^-8 of it below.
      const float q = __low2float(threshold);
      threshold = __float2bfloat162_rn(q - fminf(0.00391f * fabsf(q), 0x1p127f) - 2.0f * kRoughness);
    }
    typename F::Mask reached = keys.filter.reached(threshold);
    if (!kept) reached = 0;
    if (first_item + kItems > E) {
      reached &= first_item < E ? (typename F::Mask{1} << (E - first_item)) - 1 : typename F::Mask{0};
    }
    const SharedArray<uint16_t> list(memory + call.shared.list + token * F::kCandidates * 2);
    const SharedArray<float> values(memory + call.shared.candidates + token * F::kCandidates * 4);
    const unsigned candidates = F::collect(reached, first_item, lane, list);
    undecided |= candidates > F::kCandidates;
    __syncwarp();
    const unsigned listed = min(candidates, unsigned{F::kCandidates});
    const auto q_of = [&](unsigned expert) { return value_of(rows, softmax, expert); };
    if (exact_keys) {
      F::sort_exactly(list, listed, lane, q_of, selected());
    } else {
      const float least = __low2float(threshold) - (is_rough() ? 2.0f * kRoughness : 0.0f);
      undecided |= F::sort_nearly(list, listed, lane, least, values, q_of, selected());
    }
    return undecided;
  }

  // The warp selects for those of its tokens that are undecided, one after another.
  __device__ __forceinline__ void select_undecided(const RoundTokens& tokens, const RowSoftmax& softmax,
                                                   bool undecided) const {
    constexpr unsigned kLanesOfFirst = kLanes == kWarp ? kAllLanes : (1u << (kLanes % kWarp)) - 1u;
    unsigned pending = __ballot_sync(kAllLanes, tokens.live && undecided);
#pragma unroll 1
    while (pending != 0) {
      const unsigned other = (__ffs(static_cast<int>(pending)) - 1) / kLanes;
      const RowSoftmax its_softmax{__shfl_sync(kAllLanes, softmax.shift, other * kLanes),
                                   __shfl_sync(kAllLanes, softmax.factor, other * kLanes)};
      char* const piece = shared + (memory - block_memory);
      const SelectionScratch scratch{reinterpret_cast<uint32_t*>(piece + call.shared.keys),
                                     reinterpret_cast<uint32_t*>(piece + call.shared.groups)};
      select_exactly(op, call.selection, tokens.first + other, its_softmax, scratch,
                     reinterpret_cast<int32_t*>(piece + call.shared.selected) + other * kRanks);
      pending &= ~(kLanesOfFirst << (other * kLanes));
    }
  }

  // The selection, into `selected`: the best, or what is given.
  __device__ __forceinline__ void select(const Rows& rows, const RoundTokens& tokens, const RowSoftmax& softmax,
                                         Keys& keys) const {
    if (selects) {
      bool undecided = call.always_exact;
      if constexpr (!kOneLane) undecided |= filter_experts(rows, tokens, softmax, keys);
      select_undecided(tokens, softmax, undecided);
      if constexpr (kBalanced) {
        __syncwarp();
        const float cutoff = tokens.live ? value_of(rows, softmax, static_cast<unsigned>(selected()[K])) : NAN;
        if (tokens.present && lane == 0) call.scales[tokens.own] = {cutoff, softmax.shift, softmax.factor};
      }
    } else if (op.forced) {
#pragma unroll 1
      for (unsigned k = lane; k < K; k += kLanes) {
        selected().set(k, tokens.live ? forced_expert(op, tokens.own, k) : -1);
      }
    }
  }

  // The experts of the lane's slots, which are counted.
  __device__ __forceinline__ void take_slots(const RoundTokens& tokens, int32_t (&expert)[kSlots]) const {
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      const unsigned k = lane + s * kLanes;
      const int32_t e = selected()[min(k, kRanks - 1)];
      expert[s] = tokens.live && k < K ? e : -1;
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
    const float poison = softmax.factor - softmax.factor;  // NaN or 0
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      const float logit = rows.logit(token, static_cast<unsigned>(max(expert[s], 0)));
      weight[s] = expert[s] < 0 ? -INFINITY : logit;
    }
    if (is_softmax) {
      weigh_slots<AB_SOFTMAX, kLanes>(AB_SOFTMAX, op.normalize, softmax, poison, expert, weight);
    } else {
      weigh_slots<AB_SIGMOID, kLanes>(op.score_function, op.normalize, softmax, poison, expert, weight);
    }
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      const unsigned k = lane + s * kLanes;
      weight[s] *= op.scaling_factor;
      outputs.weights.set_if(k < K, token * K + k, weight[s]);
    }
  }

  // What leaves of the slots. Dense probabilities take the place of the logits.
  __device__ __forceinline__ void write(const Rows& rows, const RoundTokens& tokens, const int32_t (&expert)[kSlots],
                                        const float (&weight)[kSlots]) {
    // As many tokens as a warp takes, whose rows fill their places.
    const bool full = E == kLanes * kItems && call.rows_are_aligned && call.dense_is_aligned && tokens.count == kTokens;
    if (op.probs != nullptr) {
      outputs.probs = rows.address();
      __syncwarp();  // before the logits' place is taken
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

  // The warp's sums, where end_block expects them: the lanes' are rows of [tokens][experts], of which a lane adds up
  // chunks of columns.
  __device__ __forceinline__ void finish_sums() const {
    if (op.score_sum == nullptr) return;
    __syncwarp();
    const unsigned lane_sums = memory + call.shared.sums;
    constexpr unsigned kOfChunk = kChunk / sizeof(float);
    constexpr unsigned kRowChunks = kLanes * kItems / kOfChunk;
#pragma unroll 1
    for (unsigned chunk = lane_index(); chunk * kOfChunk < E; chunk += kWarp) {
      float4 sum{};
#pragma unroll
      for (unsigned row = 0; row < kTokens; ++row) {
        const auto of_row = load_shared<float4>(lane_sums + chunk_place(row * kRowChunks + chunk) * kChunk);
        sum = add(sum, of_row);
      }
      store_shared(memory + call.shared.keys + chunk * kChunk, sum);
    }
  }

  // All of a round whose logits have arrived.
  __device__ __forceinline__ void route_tokens(const Rows& rows, const RoundTokens& tokens) {
    float z[kItems];  // logits; then their powers or scores
    Keys keys;
    RowSoftmax softmax{0.0f, 1.0f};
    read_row(rows, tokens, z);
    if (!kBiased && selects) {
      take_keys(z, keys);
      if (kGrouped && !groups_by_score) keys.group.take_all(z);
    }
    if (is_softmax || op.lse != nullptr) softmax = softmax_of_row(tokens, keys, z);
    if constexpr (kBiased) {
      take_biased_scores(softmax, z, keys);
    } else if (auxiliary || groups_by_score) {
      take_scores(softmax, z, keys);
    }
    if (auxiliary) add_scores(tokens, softmax, z);
    select(rows, tokens, softmax, keys);
    if (op.wants_selection) {
      __syncwarp();
      int32_t expert[kSlots];
      float weight[kSlots];
      take_slots(tokens, expert);
      if (op.wants_weights) weigh(rows, softmax, expert, weight);
      write(rows, tokens, expert, weight);
    }
    __syncwarp();
  }

 private:
  // f(slot, expert) for the lane's slots that have one.
  template <class F>
  static __device__ __forceinline__ void for_experts(const int32_t (&expert)[kSlots], const F& f) {
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      if (expert[s] >= 0) f(s, static_cast<unsigned>(expert[s]));
    }
  }

  // Dense rows of the slots. full: the chunks of 16 bytes are a lane's.
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
        copy_chunks_out<kItems / 4>(outputs.probs, outputs.probs_of(tokens.first));
      } else if (full) {
        copy_chunks_out<kItems / 8>(outputs.probs, outputs.probs_of(tokens.first));
      } else {
        outputs.write_probs(tokens.first, tokens.count);
      }
    }
    if (outputs.has_map()) {
      constexpr unsigned kMapChunks = kItems % 16 == 0 ? kItems / 16 : 0;
      const bool whole_chunks = kMapChunks > 0 && full && op.map_format == MapFormat::bytes;
      if constexpr (kMapChunks > 0) {
        if (whole_chunks) copy_chunks_out<kMapChunks>(outputs.map, outputs.map_of(tokens.first));
      }
      if (!whole_chunks) outputs.write_map(tokens.first, tokens.count);
      __syncwarp();
      for_experts(expert, [&](unsigned, unsigned e) { outputs.unmark(token, e); });
    }
  }
};

// Where a warp has one token, with fewer registers: by measurement, for few tokens and their statistics.
template <int kLanes, int kItems>
constexpr int kBlocksOf = kLanes == kWarp && kItems <= 16 ? kBlocks + 1 : kBlocks;

template <Mode kMode, int kSize, int kLanes, int kItems, int kList, bool kGrouped>
__global__ void __launch_bounds__(kMostWarps* kWarp, kBlocksOf<kLanes, kItems>)
    route(const __grid_constant__ RouteCall call) {
  using Router = RowRouter<kMode, kSize, kLanes, kItems, kList, kGrouped>;
  using Rows = typename Router::Rows;
  constexpr unsigned kTokens = Router::kTokens;
  if constexpr (kMode == Mode::softmax && !has_logit_size<kSize>()) return fail_without_code();
  char* const shared = dynamic_shared_array<char>();
  const RouterForward& op = call.op;
  let_next_kernel_start();
  // What needs nothing of the kernel before is done by the time that one ends.
  clear_counts(call, shared);
  Router router(call, shared);
  router.outputs.clear_map(kTokens);
  router.clear_sums();
  const unsigned step = blockDim.x / kLanes;  // tokens of a round of the block
  const auto end = static_cast<unsigned>(call.tiles.end(blockIdx.x));
  unsigned first = static_cast<unsigned>(call.tiles.begin(blockIdx.x)) + warp_index() * kTokens;  // of the warp's
  const Rows rows(router.memory + call.shared.rows, router.E, call.rows_are_aligned, op.logits_dtype);
  unsigned present = rows.address();  // where the rows of this round are, and where those of the next
  unsigned next = present + rows.bytes();
  const auto logits_of = [&](unsigned token) {
    return static_cast<const char*>(op.logits) + static_cast<uint64_t>(token) * (router.E * rows.element_size());
  };
  BiasReader bias(op);
  wait_for_previous_kernel();
  bias.read();
  if (first < end) rows.start(logits_of(first), min(end - first, kTokens));
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
    tokens.live = tokens.present && (op.token_mask == nullptr || op.token_mask[tokens.own] != 0);
    if (first + step < end) {
      rows.at(next).start(logits_of(first + step), min(end - first - step, kTokens));
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

}  // namespace
}  // namespace anabranch::cuda
