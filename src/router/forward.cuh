// The forward kernel for rows that registers hold.
//
// A warp routes 32 / kLanes neighbouring tokens at a time: kLanes lanes hold the row of a token in registers, kItems
// neighbouring experts each, find its K best, and keep sums of the auxiliary scores of their experts over all tokens of
// the warp. Rows come through shared memory (staged_rows.cuh), the next ones while the present ones are worked on. The
// K selected experts of a token are slots in shared memory, dealt out to its lanes; their outputs leave in whole
// vectors. Dense outputs are rows of zeros in shared memory into which slots are scattered.
#pragma once

#include "balance/statistics.cuh"
#include "core/cuda/warp.cuh"
#include "router/block.cuh"
#include "router/filter.cuh"
#include "router/group_best.cuh"
#include "router/logit_size.cuh"
#include "router/outputs.cuh"
#include "router/row.cuh"
#include "router/select.cuh"
#include "router/staged_rows.cuh"

namespace anabranch::cuda {

// What experts are selected by and how scores are computed: by logits, which softmax or another function makes scores
// of (unbiased: either), or by scores with a bias, whatever the function (balanced: which also writes cutoffs).
enum class Mode { softmax, elementwise, unbiased, biased, balanced };

// The kernels for rows of up to lanes * items experts, by the length of the lists that hold the K best.
struct RouteVariant {
  using Kernels = KernelsBySize<RouteCall>;
  static constexpr int kLists = 4;  // 8, 16, 32, 64
  static constexpr int list(int i) { return 8 << i; }
  static constexpr int kGrouped = 0;  // the list of `grouped`

  int lanes;
  int items;
  int blocks;               // of a multiprocessor, that registers allow
  Kernels kernels[kLists];  // nullptr: none
  int candidates[kLists];   // of a token, 0 where lanes == 1
  Kernels grouped;          // K <= list(kGrouped), groups that are whole numbers of lanes; nullptr: none
};

// By experts: for many tokens, and for so few that a warp a token does not fill the device.
struct RouteVariants {
  static constexpr int kMany = 9;
  static constexpr int kFew = 6;
  RouteVariant many[kMany];
  RouteVariant few[kFew];
};
RouteVariants softmax_variants();
RouteVariants elementwise_variants();
RouteVariants biased_variants();
RouteVariants balanced_variants();

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

// selected[k] = the k-th best of a row that one lane holds, for k < kList. Keys of 32 bits give places the lowest bits
// of q.
template <int kItems, int kList, class Key, class ValueOf>
__device__ __forceinline__ void sort_row(const ValueOf& q_of, const SharedArray<int32_t>& selected) {
  Key list[kList];
  const auto key_of = [&](int i) {
    const auto place = static_cast<uint32_t>(kItems - 1 - i);
    if constexpr (sizeof(Key) == 8) {
      return static_cast<Key>(ordered_bits(q_of(i))) << 32 | place;
    } else {
      return (ordered_key(q_of(i)) & ~static_cast<uint32_t>(kItems - 1)) | place;
    }
  };
  top_of_items<kItems>(key_of, list);
#pragma unroll
  for (unsigned k = 0; k < kList; ++k) selected.set(k, kItems - 1 - static_cast<int32_t>(list[k] & (kItems - 1)));
}

// Writes the dense rows of the slots that lie in registers. `full`: as many tokens as a warp takes, whose rows fill
// their places; the chunks of 16 bytes are a lane's. All lanes of the warp come here.
template <int kItems, int kSize, int kSlots>
__device__ __forceinline__ void write_dense(const Outputs& outputs, bool full, unsigned first, unsigned count,
                                            unsigned token, const int32_t (&expert)[kSlots],
                                            const float (&weight)[kSlots]) {
  if (outputs.op.probs != nullptr) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (expert[s] >= 0) outputs.scatter_weight(token, static_cast<unsigned>(expert[s]), weight[s]);
    }
  }
  if (outputs.has_map()) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (expert[s] >= 0) outputs.mark(token, static_cast<unsigned>(expert[s]));
    }
  }
  __syncwarp();
  if (outputs.op.probs != nullptr) {
    if (full && (kSize == 0 ? outputs.element_size() : kSize) == 4) {
      copy_chunks_out<kItems / 4>(outputs.probs, outputs.probs_of(first));
    } else if (full) {
      copy_chunks_out<kItems / 8>(outputs.probs, outputs.probs_of(first));
    } else {
      outputs.write_probs(first, count);
    }
  }
  if (outputs.has_map()) {
    constexpr unsigned kMapChunks = kItems % 16 == 0 ? kItems / 16 : 0;
    const bool whole_chunks = kMapChunks > 0 && full && outputs.op.map_format == MapFormat::bytes;
    if constexpr (kMapChunks > 0) {
      if (whole_chunks) copy_chunks_out<kMapChunks>(outputs.map, outputs.map_of(first));
    }
    if (!whole_chunks) outputs.write_map(first, count);
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (expert[s] >= 0) outputs.unmark(token, static_cast<unsigned>(expert[s]));
    }
  }
}

// Blocks of a multiprocessor that registers are shared out for. Three with spilled rows are slower than two.
template <int kItems>
constexpr int kBlocks = kItems <= 16 ? 3 : 2;

// kSize: logit_size.cuh.
template <Mode kMode, int kSize, int kLanes, int kItems, int kList, bool kGrouped>
__global__ void __launch_bounds__(kMostWarps* kWarp, kBlocks<kItems>) route(const __grid_constant__ RouteCall call) {
  constexpr bool kBalanced = kMode == Mode::balanced;
  constexpr bool kBiased = kMode == Mode::biased || kBalanced;
  if constexpr (!kBiased && !has_logit_size<kSize>()) return fail_without_code();
  // With one more to find, a list of 8 runs over for some tokens in 10^4: one is enough to keep its block waiting.
  constexpr bool kFiner = kGrouped || (kBalanced && kList == 8);
  using F = Filter<kLanes, kItems, kList, kFiner ? 2 : 1>;
  using Rows = StagedRows<kLanes, kItems, kSize>;
  constexpr unsigned kTokens = kWarp / kLanes;
  constexpr unsigned kBiasStride = kItems + 4;  // 16-byte reads of neighbouring lanes fall into different banks
  constexpr bool kOneLane = kLanes == 1;
  constexpr unsigned kLanesOfFirst = kLanes == kWarp ? kAllLanes : (1u << (kLanes % kWarp)) - 1u;  // of a warp's tokens
  constexpr unsigned kRanks = kOneLane ? kList : F::kCandidates;  // of a token in `selected`
  extern __shared__ __align__(128) char shared[];
  const RouterForward& op = call.op;
  const auto E = static_cast<unsigned>(op.E);
  const auto K = static_cast<unsigned>(op.K);
  const bool exact_keys =
      !kBiased && (kSize == 0 ? op.logits_dtype != AB_FLOAT32 : kSize == 2);  // of 32 bits: they hold value and expert
  const bool is_softmax = kMode == Mode::softmax || (kMode != Mode::elementwise && op.score_function == AB_SOFTMAX);
  let_next_kernel_start();
  begin_block(call, shared, [](int e) { return e / kItems * kBiasStride + e % kItems; });
  if constexpr (kBalanced) clear_histogram(op);

  const unsigned lane = threadIdx.x % kLanes;
  const unsigned token = threadIdx.x % kWarp / kLanes;
  const unsigned first_item = lane * kItems;
  const unsigned block_memory = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const SharedArray<uint32_t> counts(block_memory + call.shared.counts);
  const SharedArray<float> bias(block_memory + call.shared.bias);
  unsigned memory = block_memory + call.shared.first_warp + warp_index() * call.shared.warp;
  asm volatile("" : "+r"(memory));  // to be kept, not computed again
  Outputs outputs{op, SharedArray<int32_t>(memory + call.shared.experts),
                  SharedArray<float>(memory + call.shared.values), 0, memory + call.shared.map};
  outputs.clear_map(kTokens);

  const bool selects = kBiased || (op.wants_selection && !op.forced);
  const bool auxiliary = op.score_sum != nullptr || op.aux_scores != nullptr;
  const bool groups_by_score = kGrouped && !kBiased && call.selection.groups_by_score;
  // bfloat16 words of the filter that are the logits themselves
  const bool words_are_logits = !kOneLane && !kBiased && kSize != 4 && selects && op.logits_dtype == AB_BFLOAT16;
  // Sums of the scores of the lane's experts over its tokens, in shared memory: registers are scarce.
  const auto for_sums = [&](auto&& each) {
    const unsigned sums = memory + call.shared.sums;
    for_chunks<kItems / 4>(sums, lane_index(), [&](unsigned i, unsigned at) { each(i * 4, at); });
  };
  if (op.score_sum != nullptr) for_sums([](unsigned, unsigned at) { store_shared(at, float4{}); });

  const int64_t block_begin = call.tiles.begin(blockIdx.x);
  const auto block_tokens = static_cast<unsigned>(call.tiles.end(blockIdx.x) - block_begin);
  const unsigned step = blockDim.x / kLanes;  // tokens of a round of the block
  unsigned begin = warp_index() * kTokens;    // of the warp's tokens, from block_begin on
  const char* logits = static_cast<const char*>(op.logits) + (block_begin + begin) * op.E * outputs.element_size();
  Rows rows(memory + call.shared.rows, E, call.rows_are_aligned, op.logits_dtype);
  Rows next_rows(rows.address() + rows.bytes(), E, call.rows_are_aligned, op.logits_dtype);
  if (begin < block_tokens) rows.start(logits, min(block_tokens - begin, kTokens));
  __syncthreads();

#pragma unroll 1
  for (; begin < block_tokens; begin += step) {
    const auto first = static_cast<unsigned>(block_begin) + begin;
    const unsigned t = first + token;
    const unsigned count = min(block_tokens - begin, kTokens);
    const bool present = token < count;
    const bool live = present && (op.token_mask == nullptr || op.token_mask[t] != 0);
    if (begin + step < block_tokens) {
      logits += step * E * rows.element_size();
      next_rows.start(logits, min(block_tokens - begin - step, kTokens));
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncwarp();
    float z[kItems];  // logits; then their powers or scores
    rows.read(first_item, z);
    if (__any_sync(kAllLanes, !live)) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = live ? z[i] : 0.0f;
    }
    const auto logit_of = [&](unsigned expert) { return rows.logit(token, expert); };
    const SharedArray<int32_t> selected(memory + call.shared.selected + token * kRanks * 4);

    // What selects: the values q of the row.
    F filter;
    typename F::Maxima maxima;
    GroupBest group;
    const auto take_row = [&](const auto& q_of) {
      if constexpr (kOneLane) {
        if (exact_keys) {
          sort_row<kItems, kList, uint32_t>(q_of, selected);
        } else {
          sort_row<kItems, kList, uint64_t>(q_of, selected);
        }
      } else {
#pragma unroll
        for (int w = 0; w < F::kWords; ++w) filter.words[w] = __floats2bfloat162_rn(q_of(w), q_of(w + F::kWords));
        maxima = filter.maxima();
      }
    };
    if (!kBiased && selects) {
      take_row([&](int i) { return z[i]; });
      if (kGrouped && !groups_by_score) group.take_all(z);
    }

    // softmax of the row
    RowSoftmax softmax{0.0f, 1.0f};
    float poison = 0.0f;
    if (is_softmax || op.lse != nullptr) {
      float top = z[0];
      if (words_are_logits) {
        top = fmaxf(__low2float(maxima.all), __high2float(maxima.all));
      } else {
#pragma unroll
        for (int i = 1; i < kItems; ++i) top = fmaxf(top, z[i]);
      }
      top = max_lanes<kLanes>(top);
      softmax.shift = top * kLog2E;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const float power = softmax.power(z[i]);  // 0 past the last expert
        if (!kBiased && is_softmax) z[i] = power;
        sum += power;
      }
      sum = sum_lanes<kLanes>(sum);
      softmax.factor = reciprocal(sum);
      poison = sum - sum;  // NaN where the sum is
      if (op.lse != nullptr && present && lane == 0) op.lse[t] = live ? top + log_f32(sum) : 0.0f;
    }

    // From here on z are powers or scores, where those of all experts are needed; times this factor, scores.
    const float score_factor = is_softmax ? softmax.factor : 1.0f;
    if constexpr (kBiased) {
      // q = -inf where z is: bits of `never`, looked for only where the sum of the row tells that there may be some.
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kItems; ++i) total += z[i];
      const bool any_never = __any_sync(kAllLanes, !(total > -INFINITY));
      typename F::Mask never = 0;
      if (any_never) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) never |= static_cast<typename F::Mask>(z[i] == -INFINITY) << i;
      }
      if (is_softmax) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) z[i] = softmax.power(z[i]);
      } else {
        score_items(op.score_function, z);
      }
      float q[kItems];
#pragma unroll
      for (int i = 0; i < kItems; i += 4) {
        const auto b = load_shared<float4>(bias.from(lane * kBiasStride + i).address());
        q[i] = fmaf(z[i], score_factor, b.x);
        q[i + 1] = fmaf(z[i + 1], score_factor, b.y);
        q[i + 2] = fmaf(z[i + 2], score_factor, b.z);
        q[i + 3] = fmaf(z[i + 3], score_factor, b.w);
      }
      if (any_never) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) q[i] = (never >> i & 1) != 0 ? -INFINITY : q[i];
      }
      take_row([&](int i) { return q[i]; });
      if constexpr (kGrouped) group.take_all(q);
    } else if (auxiliary || groups_by_score) {
      if constexpr (kMode != Mode::softmax) {
        if (!is_softmax) score_items(op.score_function, z);
      }
      if (groups_by_score) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const float s = z[i] * score_factor;
          group.take(s == 0.0f ? -INFINITY : s);  // 0 may stand for -inf
        }
      }
    }

    // auxiliary scores
    if (auxiliary) {
      float factor = softmax.factor;
      if (!is_softmax) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kItems; ++i) total += z[i];  // 0 past the last expert
        factor = reciprocal(sum_lanes<kLanes>(total) + kSumEpsilon);
      }
      if (!live) factor = 0.0f;
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
      if (op.aux_scores != nullptr && present) {
        float* const row = op.aux_scores + static_cast<size_t>(t) * E + first_item;
#pragma unroll
        for (unsigned i = 0; i < kItems; ++i) {
          if (first_item + i < E) row[i] = z[i] * factor;
        }
      }
    }

    // the K best experts
    if (selects) {
      bool undecided = call.always_exact;
      const auto value_of = [&](unsigned expert) {
        const float logit = logit_of(expert);
        if constexpr (!kBiased) return logit;
        const float s = is_softmax ? softmax.power(logit) : elementwise_score(op.score_function, logit);
        const float q = fmaf(s, score_factor, bias[expert / kItems * kBiasStride + expert % kItems]);
        return logit == -INFINITY ? logit : q;
      };
      if constexpr (!kOneLane) {
        undecided |= !__hbeq2(maxima.all, maxima.all);  // NaN
        bool kept = live;
        if constexpr (kGrouped) {
          kept = group.is_kept<kLanes>(op, static_cast<int>(lane)) && live;
          undecided |= group.broken != 0.0f;
          if (!kept) {
#pragma unroll
            for (int w = 0; w < F::kMaxima; ++w) maxima.words[w] = __float2bfloat162_rn(-INFINITY);
          }
        }
        const __nv_bfloat162 threshold = F::template threshold<kBalanced>(maxima.words, lane);
        typename F::Mask reached = filter.reached(threshold);
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
        if (exact_keys) {
          F::sort_exactly(list, listed, lane, value_of, selected);
        } else {
          undecided |= F::sort_nearly(list, listed, lane, threshold, values, value_of, selected);
        }
      }
      unsigned pending = __ballot_sync(kAllLanes, live && undecided);
#pragma unroll 1
      while (pending != 0) {
        const unsigned other = (__ffs(static_cast<int>(pending)) - 1) / kLanes;
        const RowSoftmax its_softmax{__shfl_sync(kAllLanes, softmax.shift, other * kLanes),
                                     __shfl_sync(kAllLanes, softmax.factor, other * kLanes)};
        char* const piece = shared + (memory - block_memory);
        const SelectionScratch scratch{reinterpret_cast<uint32_t*>(piece + call.shared.keys),
                                       reinterpret_cast<uint32_t*>(piece + call.shared.groups)};
        select_exactly(op, call.selection, first + other, its_softmax, scratch,
                       reinterpret_cast<int32_t*>(piece + call.shared.selected) + other * kRanks);
        pending &= ~(kLanesOfFirst << (other * kLanes));
      }
      if constexpr (kBalanced) {
        __syncwarp();
        const float cutoff = live ? value_of(static_cast<unsigned>(selected[K])) : NAN;
        if (present && lane == 0) call.scales[t] = {cutoff, softmax.shift, softmax.factor};
      }
    } else if (op.forced) {
#pragma unroll 1
      for (unsigned k = lane; k < K; k += kLanes) selected.set(k, live ? forced_expert(op, t, k) : -1);
    }

    // the slots: counts, weights, outputs
    if (op.wants_selection) {
      __syncwarp();
      constexpr unsigned kSlots = (kList + kLanes - 1) / kLanes;
      int32_t expert[kSlots];
      float weight[kSlots];
#pragma unroll
      for (unsigned s = 0; s < kSlots; ++s) {
        const unsigned k = lane + s * kLanes;
        const int32_t e = selected[min(k, kRanks - 1)];
        expert[s] = live && k < K ? e : -1;
        outputs.experts.set_if(k < K, token * K + k, expert[s]);
      }
      if (op.tokens_per_expert != nullptr) {
#pragma unroll
        for (unsigned s = 0; s < kSlots; ++s) counts.count_if(expert[s] >= 0, static_cast<unsigned>(expert[s]));
      }
      if (op.wants_weights) {
#pragma unroll
        for (unsigned s = 0; s < kSlots; ++s) {
          const float logit = logit_of(static_cast<unsigned>(max(expert[s], 0)));
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
      const bool full = E == kLanes * kItems && call.rows_are_aligned && call.dense_is_aligned && count == kTokens;
      if (op.probs != nullptr) {
        outputs.probs = rows.address();
        __syncwarp();  // before the logits' place is taken
        if (full) {
          rows.clear();
        } else {
          outputs.clear_probs(count);
        }
      }
      __syncwarp();
      outputs.write_slots(first, count);
      if (op.probs != nullptr || outputs.has_map()) {
        write_dense<kItems, kSize>(outputs, full, first, count, token, expert, weight);
      }
    }
    __syncwarp();
    const Rows used = rows;
    rows = next_rows;
    next_rows = used;
  }

  if (op.score_sum != nullptr) {
    // The lanes' sums are rows of [tokens][experts]: a lane adds up chunks of columns.
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
        sum = {sum.x + of_row.x, sum.y + of_row.y, sum.z + of_row.z, sum.w + of_row.w};
      }
      store_shared(memory + call.shared.keys + chunk * kChunk, sum);
    }
  }
  end_block(call, shared);
}

template <Mode kMode, int kLanes, int kItems, int kList, bool kGrouped>
constexpr RouteVariant::Kernels by_size() {
  if constexpr (kMode == Mode::biased || kMode == Mode::balanced) {
    // Scores take so long that the size, asked for at run time, costs 1.6%.
    constexpr auto of_any = route<kMode, 0, kLanes, kItems, kList, kGrouped>;
    return {of_any, of_any, of_any};
  } else {
    return {route<Mode::unbiased, 0, kLanes, kItems, kList, kGrouped>, route<kMode, 2, kLanes, kItems, kList, kGrouped>,
            route<kMode, 4, kLanes, kItems, kList, kGrouped>};
  }
}

template <Mode kMode, int kLanes, int kItems, int kList>
constexpr void add_list(RouteVariant* variant) {
  int i = 0;
  while (RouteVariant::list(i) < kList) ++i;
  variant->kernels[i] = by_size<kMode, kLanes, kItems, kList, false>();
  if constexpr (kLanes > 1) {
    static_assert(Filter<kLanes, kItems, kList>::kExists);
    variant->candidates[i] = Filter<kLanes, kItems, kList>::kCandidates;
  }
}

template <Mode kMode, int kLanes, int kItems, bool kGrouped, int... kListLengths>
constexpr RouteVariant variant() {
  RouteVariant v{kLanes, kItems, kBlocks<kItems>, {}, {}, {}};
  (add_list<kMode, kLanes, kItems, kListLengths>(&v), ...);
  if constexpr (kGrouped)
    v.grouped = by_size<kMode, kLanes, kItems, RouteVariant::list(RouteVariant::kGrouped), true>();
  return v;
}

template <Mode kMode>
RouteVariants variants() {
  constexpr RouteVariant k8 = variant<kMode, 1, 8, false, 8>();
  constexpr RouteVariant k16 = variant<kMode, 1, 16, false, 8>();
  constexpr RouteVariant k32 = variant<kMode, 1, 32, false, 8>();
  constexpr RouteVariant k1024 = variant<kMode, 32, 32, false, 8, 64>();
  return {{k8, k16, k32, variant<kMode, 2, 32, false, 8, 16>(), variant<kMode, 4, 32, true, 8, 16>(),
           variant<kMode, 8, 32, true, 8, 16, 32>(), variant<kMode, 8, 48, false, 8>(),
           variant<kMode, 16, 32, true, 8, 16, 32, 64>(), k1024},
          {k8, k16, k32, variant<kMode, 32, 8, true, 8, 32>(), variant<kMode, 32, 16, false, 8, 32>(), k1024}};
}

}  // namespace
}  // namespace anabranch::cuda
