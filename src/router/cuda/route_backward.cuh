// The backward kernel for rows that registers hold: d_logits from the cotangents of weights, auxiliary scores and lse,
// written once.
//
// A warp takes 32 / kLanes neighbouring tokens at a time, as the forward kernel does: kLanes lanes hold the row of a
// token, kItems neighbouring experts each. What every expert gets (softmax terms, auxiliary scores) is computed from
// the logits in registers and takes their place in shared memory; a slot's lane computes all that its expert gets and
// puts it there. Where only selected experts get a gradient, rows are zeros and no row of logits is read.
#pragma once

#include "balance/statistics.cuh"
#include "core/cuda/dynamic_memory.cuh"
#include "core/cuda/element.cuh"
#include "router/backward.h"
#include "router/cuda/logit_size.cuh"
#include "router/cuda/row.cuh"
#include "router/cuda/staged_rows.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kWarps = 8;     // of a block
constexpr int kFewWarps = 4;  // for few tokens

// Which score functions a kernel is for: softmax, the others, or any of them, which it asks at run time.
enum class Scores { softmax, elementwise, any };

struct BackwardCall {
  RouterBackward op;
  TokenTiles tiles;
  bool logits_are_aligned;  // to 16 bytes
  bool gradients_are_aligned;
  // Byte offsets in shared memory; per-warp pieces are `warp` bytes apart from `first_warp` on.
  int first_warp;  // before it: float [kLanes][kItems + 4], the cotangent of score_sum
  int warp;
  int d_aux_scores;  // float [32][kItems + 4], those of the warp's tokens
  int experts;       // int32 [tokens][K]
  int gradients;     // float [tokens][K]
};

__device__ __forceinline__ float load(const Cotangent& cotangent, int64_t i) {
  return load_float(cotangent.data, cotangent.dtype, i);
}

// Blocks of a multiprocessor that registers are shared out for. Without rows the more the better: as many as leave
// enough to a thread, and find room in shared memory.
constexpr int blocks_of(Scores scores, int size, int slots, bool reads_rows) {
  if (reads_rows) return slots == 1 && scores == Scores::softmax ? 3 : 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  constexpr int kMost = 6;  // a multiprocessor has 1536 threads there, 2048 before
#else
  constexpr int kMost = 8;
#endif
  return slots > 1 ? 4 : size == 2 ? kMost : 5;
}

// One lane's part in the gradients of a round's tokens, which go through these functions from top to bottom. kSize:
// logit_size.cuh. kReadsRows: some gradient needs the whole row. K <= kLanes * kSlots.
template <Scores kScores, int kSize, int kLanes, int kItems, int kSlots, bool kReadsRows>
struct RowGradients {
  using Rows = StagedRows<kLanes, kItems, kSize>;
  static constexpr unsigned kTokens = kWarp / kLanes;
  static constexpr unsigned kStride = kItems + 4;  // 16-byte reads of neighbouring lanes fall into different banks

  const BackwardCall& call;
  const RouterBackward& op;
  unsigned block_memory;
  unsigned memory;  // of the warp
  unsigned E;
  unsigned K;
  unsigned lane;   // of its token
  unsigned token;  // of its round
  bool is_softmax;
  bool has_aux;  // cotangents of each token's own auxiliary scores

  // The tokens of a round, and of them the lane's.
  struct Token {
    unsigned first;  // of the round
    unsigned count;
    unsigned own;
    bool live;  // present and not masked
    float lse;
    float d_lse;
  };
  struct Slots {
    int32_t expert[kSlots];
    float gradient[kSlots];  // of the weights, then of the logits
    float value[kSlots];     // logits
  };
  // What every expert's gradient needs of its row.
  struct RowSums {
    RowSoftmax softmax{0.0f, 1.0f};
    float poison;          // NaN where a row of softmax is broken
    float dot = 0.0f;      // sum of G s
    float inverse = 0.0f;  // of the sum of elementwise scores
    float shift = 0.0f;
  };

  __device__ __forceinline__ RowGradients(const BackwardCall& of, unsigned block_shared)
      : call(of),
        op(of.op),
        block_memory(block_shared),
        memory(keep_in_register(block_shared + call.first_warp + warp_index() * call.warp)),
        E(static_cast<unsigned>(op.E)),
        K(static_cast<unsigned>(op.K)),
        lane(threadIdx.x % kLanes),
        token(threadIdx.x % kWarp / kLanes),
        is_softmax(kScores == Scores::softmax || (kScores == Scores::any && op.score_function == AB_SOFTMAX)),
        has_aux(kReadsRows && op.d_aux_scores.data != nullptr) {}

  // Cotangents of the auxiliary scores stand where a lane finds those of its items: those of score_sum, the same for
  // all tokens of the block, or each token's own, which come with its row.
  static __device__ __forceinline__ unsigned cotangent_place(unsigned expert) {
    return expert / kItems * kStride + expert % kItems;
  }
  __device__ __forceinline__ SharedArray<float> own_cotangents() const {
    return SharedArray<float>(memory + call.d_aux_scores);
  }
  __device__ __forceinline__ SharedArray<float> cotangents() const {  // of the lane's token
    return has_aux ? own_cotangents().from(token * kLanes * kStride) : SharedArray<float>(block_memory);
  }
  // f(i, G of the lane's item i)
  template <class F>
  __device__ __forceinline__ void for_cotangents(const F& f) const {
#pragma unroll
    for (unsigned i = 0; i < kItems; i += 4) {
      const auto g = load_shared<float4>(cotangents().from(lane * kStride + i).address());
      f(i, g.x);
      f(i + 1, g.y);
      f(i + 2, g.z);
      f(i + 3, g.w);
    }
  }
  __device__ __forceinline__ void load_sum_cotangents() const {
    if (!kReadsRows || op.d_score_sum.data == nullptr) return;
    const int64_t row = static_cast<int64_t>(blockIdx.x / call.tiles.blocks_per_sequence) * E;
#pragma unroll 1
    for (unsigned e = threadIdx.x; e < kLanes * kItems; e += blockDim.x) {
      cotangents().set(cotangent_place(e), e < E ? cuda::load(op.d_score_sum, row + e) : 0.0f);
    }
  }
  __device__ __forceinline__ void load_own_cotangents(const Token& of) const {
    if (!has_aux) return;
    __syncwarp();  // those of the round before have been read
#pragma unroll 1
    for (unsigned place = lane_index(); place < kTokens * kLanes * kItems; place += kWarp) {
      const unsigned row = place / (kLanes * kItems);
      const unsigned e = place % (kLanes * kItems);
      const bool there = row < of.count && e < E;
      own_cotangents().set(row * kLanes * kStride + cotangent_place(e),
                           there ? cuda::load(op.d_aux_scores, static_cast<int64_t>(of.first + row) * E + e) : 0.0f);
    }
  }

  // Experts of the slots of token t, -1 where there is none.
  __device__ __forceinline__ void fetch_experts(unsigned t, bool there, int32_t (&experts)[kSlots]) const {
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      const unsigned k = lane + s * kLanes;
      experts[s] = -1;
      if (op.weighted && k < K && there) experts[s] = op.experts[size_t{t} * K + k];
    }
  }

  // What a round needs from memory beside rows: of its slots, with logits only where no row is read, and lse.
  __device__ __forceinline__ void load(const int32_t (&experts)[kSlots], Token& of, Slots& slots) const {
    of.own = of.first + token;
    of.live = token < of.count && (op.token_mask == nullptr || op.token_mask[of.own] != 0);
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      slots.expert[s] = of.live && experts[s] >= 0 && experts[s] < op.E ? experts[s] : -1;
      slots.gradient[s] = 0.0f;
      slots.value[s] = -INFINITY;
      if (slots.expert[s] >= 0) {
        const size_t place = size_t{of.own} * E + static_cast<unsigned>(slots.expert[s]);
        slots.gradient[s] = op.d_weights.data != nullptr
                                ? cuda::load(op.d_weights, int64_t{of.own} * K + lane + s * kLanes)
                                : cuda::load(op.d_probs, static_cast<int64_t>(place));
        if (!kReadsRows) slots.value[s] = load_float(op.logits, op.logits_dtype, static_cast<int64_t>(place));
      }
    }
    of.lse = 0.0f;
    of.d_lse = 0.0f;
    if (op.lse != nullptr && of.live) of.lse = op.lse[of.own];
    if (kReadsRows && op.d_lse.data != nullptr && of.live) of.d_lse = cuda::load(op.d_lse, of.own);
  }

  // z: the lane's logits, zeros of a token that is not there; and those of its slots.
  __device__ __forceinline__ void read_row(const Rows& rows, const Token& of, float (&z)[kItems], Slots& slots) const {
    rows.read(lane * kItems, z);
    if (__any_sync(kAllLanes, !of.live)) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = of.live ? z[i] : 0.0f;
    }
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      const float logit = rows.logit(token, static_cast<unsigned>(max(slots.expert[s], 0)));
      slots.value[s] = slots.expert[s] < 0 ? -INFINITY : logit;
    }
  }

  // softmax with lse as the shift where it is known: dividing by the sum takes its rounding out. Where it is the score
  // function, z become powers.
  __device__ __forceinline__ void softmax_of_row(const Token& of, float (&z)[kItems], RowSums& row) const {
    row.softmax.shift = of.lse * kLog2E;
    if (op.lse == nullptr) {
      float top = z[0];
#pragma unroll
      for (int i = 1; i < kItems; ++i) top = fmaxf(top, z[i]);
      row.softmax.shift = max_lanes<kLanes>(top) * kLog2E;
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const float power = row.softmax.power(z[i]);
      sum += power;
      if (is_softmax) z[i] = power;
    }
    sum = sum_lanes<kLanes>(sum);
    row.softmax.factor = reciprocal(sum);
    row.poison = sum - sum;
  }

  // Sums of auxiliary scores, by themselves and with their cotangents. Those of other functions than softmax leave
  // their slopes in z.
  __device__ __forceinline__ void sum_scores(float (&z)[kItems], RowSums& row) const {
    if (is_softmax) {
      for_cotangents([&](int i, float g) { row.dot = fmaf(z[i], g, row.dot); });
      row.dot = sum_lanes<kLanes>(row.dot) * row.softmax.factor;
      return;
    }
    float sum = 0.0f;
    const auto add = [&](const auto& score_of) {
      for_cotangents([&](int i, float g) {
        const ScoreAndSlope of = score_of(z[i]);
        z[i] = of.slope;
        sum += of.score;
        row.dot = fmaf(of.score, g, row.dot);
      });
    };
    if (op.score_function == AB_SIGMOID) {
      add([](float z) { return sigmoid_and_slope(z); });
    } else {
      add([](float z) { return sqrtsoftplus_and_slope(z); });
    }
    row.inverse = reciprocal(sum_lanes<kLanes>(sum) + kSumEpsilon);
    row.dot = sum_lanes<kLanes>(row.dot) * row.inverse;
  }

  // Cotangents of the weights of a token's slots become those of their logits, as far as they come through the selected
  // experts alone (semantics: router backward). Returns sum_R g s for raw softmax, which every expert's gradient needs;
  // else 0.
  __device__ __forceinline__ float slot_gradients(const RowSums& row, Slots& slots) const {
    float weight[kSlots];
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      slots.gradient[s] *= op.scaling_factor;
      weight[s] = slots.value[s];
    }
    const float inverse = is_softmax ? weigh_slots<AB_SOFTMAX, kLanes>(op.score_function, op.normalize, row.softmax,
                                                                       row.poison, slots.expert, weight)
                                     : weigh_slots<AB_SIGMOID, kLanes>(op.score_function, op.normalize, row.softmax,
                                                                       row.poison, slots.expert, weight);
    float dot = 0.0f;
    if (is_softmax || op.normalize) {
#pragma unroll
      for (unsigned s = 0; s < kSlots; ++s) dot = fmaf(slots.gradient[s], weight[s], dot);
      dot = sum_lanes<kLanes>(dot);
    }
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      float& g = slots.gradient[s];
      if (is_softmax) {
        // normalised: dz_k = p_k (g_k - sum_R g p).  raw: dz_e = s_e ([e in R] g_e - sum_R g s).
        g = weight[s] * (g - (op.normalize ? dot : 0.0f));
      } else {
        // ds_k = (g_k - sum_R g_j s_j / S) / S, or g_k;  dz_k = ds_k s'(z_k)
        const float ds = op.normalize ? (g - dot) * inverse : g;
        g = slots.expert[s] < 0 ? 0.0f : ds * elementwise_slope(op.score_function, slots.value[s]);
      }
    }
    return is_softmax && !op.normalize ? dot : 0.0f;
  }

  // What an expert gets with all others, of the cotangent G of its auxiliary score:
  // d_e = s_e (G_e - sum G s + d_lse - sum_R g s), s = softmax(z): auxiliary scores, lse and raw weights.
  __device__ __forceinline__ float through_softmax(const RowSums& row, float power, float g) const {
    return power * fmaf(g, row.softmax.factor, row.shift);
  }
  // d_e = s'_e (G_e - sum G s / S) / S: auxiliary scores of the other score functions.
  __device__ __forceinline__ float through_score(const RowSums& row, float slope, float g) const {
    return (g - row.dot) * row.inverse * slope;
  }

  // Turns powers, slopes or logits, whichever stand in z, into gradients.
  __device__ __forceinline__ void write_row(const Rows& rows, const RowSums& row, bool live, float (&z)[kItems]) const {
    if (is_softmax && op.auxiliary) {
      for_cotangents([&](int i, float g) { z[i] = live ? through_softmax(row, z[i], g) : 0.0f; });
    } else if (op.auxiliary) {
      for_cotangents([&](int i, float g) { z[i] = live ? through_score(row, z[i], g) : 0.0f; });
    } else {
      const bool is_zero = !live || !is_softmax || !op.softmax_rows;
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = is_zero ? 0.0f : through_softmax(row, z[i], 0.0f);
    }
    if (!is_softmax && op.softmax_rows) add_lse(rows, row, live, z);
    rows.write(z);
  }
  // The gradient of lse beside another score function: rare, so logits are read again one by one.
  __device__ __forceinline__ void add_lse(const Rows& rows, const RowSums& row, bool live, float (&z)[kItems]) const {
#pragma unroll
    for (unsigned i = 0; i < kItems; ++i) {
      const unsigned expert = lane * kItems + i;
      if (live && expert < E) z[i] += through_softmax(row, row.softmax.power(rows.logit(token, expert)), 0.0f);
    }
  }
  // The same for a slot's expert.
  __device__ __forceinline__ float gradient_of(const RowSums& row, unsigned expert, float z) const {
    const float g = op.auxiliary ? cotangents()[cotangent_place(expert)] : 0.0f;
    float d = 0.0f;
    if (op.softmax_rows) d = through_softmax(row, row.softmax.power(z), is_softmax ? g : 0.0f);
    if (!is_softmax && op.auxiliary) d += through_score(row, elementwise_slope(op.score_function, z), g);
    return d;
  }

  // Whether some expert was selected twice, which a replay may do. A slot is compared with those of half the lanes
  // around it: every pair of lanes has one that looks.
  __device__ __forceinline__ bool any_repeated(const Slots& slots) const {
    bool repeated = false;
    const auto look = [&](int32_t expert, unsigned slot) { repeated |= expert == slots.expert[slot] && expert >= 0; };
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
#pragma unroll
      for (unsigned other = 0; other < s; ++other) look(slots.expert[s], other);
#pragma unroll
      for (unsigned distance = 1; distance <= kLanes / 2; ++distance) {
        const int32_t expert = __shfl_sync(kAllLanes, slots.expert[s], static_cast<int>(lane + distance), kLanes);
#pragma unroll
        for (unsigned other = 0; other < kSlots; ++other) look(expert, other);
      }
    }
    return __any_sync(kAllLanes, repeated);
  }

  // All slots of an expert get the sum over them, in the order of slots, and write the same.
  __device__ __forceinline__ void add_repeated(Slots& slots) const {
    if (any_repeated(slots)) {
      const auto experts = SharedArray<int32_t>(memory + call.experts).from(token * K);
      const auto gradients = SharedArray<float>(memory + call.gradients).from(token * K);
#pragma unroll
      for (unsigned s = 0; s < kSlots; ++s) {
        const unsigned k = lane + s * kLanes;
        experts.set_if(k < K, k, slots.expert[s]);
        gradients.set_if(k < K, k, slots.gradient[s]);
      }
      __syncwarp();
#pragma unroll
      for (unsigned s = 0; s < kSlots; ++s) {
        slots.gradient[s] = 0.0f;
        for (unsigned k = 0; k < K; ++k) {
          if (experts[k] == slots.expert[s]) slots.gradient[s] += gradients[k];
        }
      }
    }
    __syncwarp();
  }

  // Puts all that the slots' experts get where what every expert gets stands.
  __device__ __forceinline__ void write_slots(const Rows& rows, const RowSums& row, const Slots& slots) const {
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      if (slots.expert[s] < 0) continue;
      const auto e = static_cast<unsigned>(slots.expert[s]);
      float d = slots.gradient[s];
      if constexpr (kReadsRows) d += gradient_of(row, e, slots.value[s]);
      rows.set(token, e, d);
    }
  }

  // All of a round whose loads are on their way and whose logits have arrived.
  __device__ __forceinline__ void compute(const Rows& rows, const Token& of, Slots& slots) const {
    float z[kItems];
    RowSums row;
    row.poison = of.lse - of.lse;
    if constexpr (kReadsRows) {
      read_row(rows, of, z, slots);
      if (op.softmax_rows || (is_softmax && op.lse == nullptr)) softmax_of_row(of, z, row);
      if (op.auxiliary) sum_scores(z, row);
    }
    const float raw = op.weighted ? slot_gradients(row, slots) : 0.0f;
    row.shift = (of.d_lse - raw - (is_softmax ? row.dot : 0.0f)) * row.softmax.factor;
    __syncwarp();  // logits of the slots have been read
    if constexpr (kReadsRows) {
      write_row(rows, row, of.live, z);
    } else {
      rows.clear();
    }
    __syncwarp();
    if (op.weighted) {
      add_repeated(slots);
      write_slots(rows, row, slots);
      __syncwarp();
    }
  }
};

template <Scores kScores, int kSize, int kLanes, int kItems, int kSlots, bool kReadsRows>
__global__ void __launch_bounds__(kWarps* kWarp, blocks_of(kScores, kSize, kSlots, kReadsRows))
    route_backward(const __grid_constant__ BackwardCall call) {
  if constexpr (!has_logit_size<kSize>()) return fail_without_code();
  using Gradients = RowGradients<kScores, kSize, kLanes, kItems, kSlots, kReadsRows>;
  using Rows = typename Gradients::Rows;
  constexpr unsigned kTokens = Gradients::kTokens;
  char* const shared = dynamic_shared_array<char>();
  const RouterBackward& op = call.op;
  constexpr bool kAhead = kReadsRows && kScores == Scores::softmax && (kLanes == 4 || kLanes == 8);
  const Gradients gradients(call, static_cast<unsigned>(__cvta_generic_to_shared(shared)));
  let_next_kernel_start();
  wait_for_previous_kernel();
  gradients.load_sum_cotangents();

  const int64_t block_begin = call.tiles.begin(blockIdx.x);
  const auto block_tokens = static_cast<unsigned>(call.tiles.end(blockIdx.x) - block_begin);
  const unsigned step = blockDim.x / kLanes;  // tokens of a round of the block
  unsigned begin = warp_index() * kTokens;    // of the warp's tokens, from block_begin on
  Rows rows(gradients.memory, gradients.E, call.logits_are_aligned, op.logits_dtype);
  Rows next_rows = rows.at(rows.address() + (kReadsRows ? rows.bytes() : 0));
  const unsigned row_bytes = gradients.E * rows.element_size();
  const char* logits = static_cast<const char*>(op.logits) + (block_begin + begin) * row_bytes;

  // Loads run ahead of the rounds that they are for: rows by one, and what slots need too where that pays, their
  // experts by one more.
  int32_t experts[kSlots];
  typename Gradients::Token next_of{};
  typename Gradients::Slots next_slots;
  const auto fetch_experts = [&](unsigned from) {
    gradients.fetch_experts(static_cast<unsigned>(block_begin) + from + gradients.token,
                            from + gradients.token < block_tokens, experts);
  };
  const auto load_round = [&](unsigned from) {
    next_of.first = static_cast<unsigned>(block_begin) + from;
    next_of.count = min(block_tokens - from, kTokens);
    gradients.load(experts, next_of, next_slots);
  };
  const auto start_rows = [&](const Rows& to, unsigned from) {
    if (!kReadsRows) return;
    if (from < block_tokens) {
      to.start(logits, min(block_tokens - from, kTokens));
    } else {
      end_copy_group();  // an empty one: they are counted
    }
    logits += step * row_bytes;
  };
  start_rows(rows, begin);
  if (begin < block_tokens) {
    fetch_experts(begin);
    if (kAhead) {
      load_round(begin);
      fetch_experts(begin + step);
    }
  }
  __syncthreads();

#pragma unroll 1
  for (; begin < block_tokens; begin += step) {
    if (!kAhead) load_round(begin);
    const typename Gradients::Token of = next_of;
    typename Gradients::Slots slots = next_slots;
    if (begin + step < block_tokens) {
      if (kAhead) load_round(begin + step);
      fetch_experts(begin + (kAhead ? 2 : 1) * step);
    }
    start_rows(next_rows, begin + step);
    if (kReadsRows) wait_for_copies<1>();
    gradients.load_own_cotangents(of);
    __syncwarp();
    gradients.compute(rows, of, slots);
    char* const out = static_cast<char*>(op.d_logits) + size_t{of.first} * row_bytes;
    rows.copy_out(out, of.count, call.gradients_are_aligned);
    __syncwarp();
    const Rows used = rows;
    rows = next_rows;
    next_rows = used;
  }
}

}  // namespace
}  // namespace anabranch::cuda
