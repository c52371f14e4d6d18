// The backward kernel for rows that fit in registers: d_logits from the cotangents of weights, auxiliary scores and
// lse, written once.
//
// As in the forward kernel, a warp processes 32 / kLanes consecutive tokens per round, and kLanes lanes hold the row of
// a token, with kItems consecutive experts per lane. The terms of all experts (softmax terms, auxiliary scores) are
// computed from the logits in registers and overwrite the logits in shared memory. The lane of a slot computes the
// whole gradient of its expert and writes it to that row. If only selected experts have a gradient, rows are zeros and
// no logits rows are read.
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

constexpr int kWarps = 8;     // per block
constexpr int kFewWarps = 4;  // for few tokens

// The score functions that a kernel supports: softmax, the elementwise ones, or any, tested at run time.
enum class Scores { softmax, elementwise, any };

struct BackwardCall {
  RouterBackward op;
  TokenTiles tiles;
  bool logits_are_aligned;  // to 16 bytes
  bool gradients_are_aligned;
  // Byte offsets in shared memory. Each warp has `warp` bytes, starting at `first_warp`.
  int first_warp;  // before it: float [kLanes][kItems + 4], the cotangent of score_sum
  int warp;
  int d_aux_scores;  // float [32][kItems + 4], for the warp's tokens
  int experts;       // int32 [tokens][K]
  int gradients;     // float [tokens][K]
};

__device__ __forceinline__ float load(const Cotangent& cotangent, int64_t i) {
  return load_float(cotangent.data, cotangent.dtype, i);
}

// Blocks per SM, for the register limit. Without rows more blocks are faster: as many as leave enough registers per
// thread and fit in shared memory.
constexpr int blocks_per_sm(Scores scores, int size, int slots, bool reads_rows) {
  if (reads_rows) return slots == 1 && scores == Scores::softmax ? 3 : 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  constexpr int kMaxBlocks = 6;  // such an SM has 1536 threads, older ones 2048
#else
  constexpr int kMaxBlocks = 8;
#endif
  return slots > 1 ? 4 : size == 2 ? kMaxBlocks : 5;
}

// One lane's part in the gradients of a round's tokens. A round calls these functions from top to bottom. kSize: see
// logit_size.cuh. kReadsRows: some gradient needs the whole row. K <= kLanes * kSlots.
template <Scores kScores, int kSize, int kLanes, int kItems, int kSlots, bool kReadsRows>
struct RowGradients {
  using Rows = StagedRows<kLanes, kItems, kSize>;
  static constexpr unsigned kTokens = kWarp / kLanes;
  static constexpr unsigned kStride = kItems + 4;  // 16-byte reads of adjacent lanes use different banks

  const BackwardCall& call;
  const RouterBackward& op;
  unsigned block_memory;
  unsigned memory;  // the address of the warp's part
  unsigned E;
  unsigned K;
  unsigned lane;   // lane within its token
  unsigned token;  // token within its round
  bool is_softmax;
  bool has_aux;  // each token has its own cotangents of auxiliary scores

  // The tokens of a round, and the state of the lane's token.
  struct Token {
    unsigned first;  // first token of the round
    unsigned count;
    unsigned own;
    bool unmasked;  // present and not masked
    float lse;
    float d_lse;
  };
  struct Slots {
    int32_t expert[kSlots];
    float gradient[kSlots];  // of the weights, later of the logits
    float value[kSlots];     // logits
  };
  // The sums over a row that the gradient of every expert needs.
  struct RowSums {
    RowSoftmax softmax{0.0f, 1.0f};
    float nan_or_zero;     // NaN if a softmax row contains NaN or infinity, else 0
    float dot = 0.0f;      // sum of G s
    float inverse = 0.0f;  // 1 / (sum of elementwise scores)
    float shift = 0.0f;
  };

  __device__ __forceinline__ RowGradients(const BackwardCall& backward_call, unsigned block_shared)
      : call(backward_call),
        op(backward_call.op),
        block_memory(block_shared),
        memory(keep_in_register(block_shared + call.first_warp + warp_index() * call.warp)),
        E(static_cast<unsigned>(op.E)),
        K(static_cast<unsigned>(op.K)),
        lane(threadIdx.x % kLanes),
        token(threadIdx.x % kWarp / kLanes),
        is_softmax(kScores == Scores::softmax || (kScores == Scores::any && op.score_function == AB_SOFTMAX)),
        has_aux(kReadsRows && op.d_aux_scores.data != nullptr) {}

  // The position of an expert's cotangent, such that a lane finds those of its items. Cotangents of the auxiliary
  // scores are either those of score_sum, common to all tokens of the block, or each token's own, loaded with its row.
  static __device__ __forceinline__ unsigned cotangent_place(unsigned expert) {
    return expert / kItems * kStride + expert % kItems;
  }
  __device__ __forceinline__ SharedArray<float> own_cotangents() const {
    return SharedArray<float>(memory + call.d_aux_scores);
  }
  __device__ __forceinline__ SharedArray<float> cotangents() const {  // for the lane's token
    return has_aux ? own_cotangents().from(token * kLanes * kStride) : SharedArray<float>(block_memory);
  }
  // Calls f(i, G of the lane's item i).
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
  __device__ __forceinline__ void load_own_cotangents(const Token& info) const {
    if (!has_aux) return;
    __syncwarp();  // the cotangents of the previous round have been read
#pragma unroll 1
    for (unsigned place = lane_index(); place < kTokens * kLanes * kItems; place += kWarp) {
      const unsigned row = place / (kLanes * kItems);
      const unsigned e = place % (kLanes * kItems);
      const bool in_bounds = row < info.count && e < E;
      own_cotangents().set(
          row * kLanes * kStride + cotangent_place(e),
          in_bounds ? cuda::load(op.d_aux_scores, static_cast<int64_t>(info.first + row) * E + e) : 0.0f);
    }
  }

  // The experts of the slots of token t, -1 for none.
  __device__ __forceinline__ void fetch_experts(unsigned t, bool in_bounds, int32_t (&experts)[kSlots]) const {
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      const unsigned k = lane + s * kLanes;
      experts[s] = -1;
      if (op.weighted && k < K && in_bounds) experts[s] = op.experts[size_t{t} * K + k];
    }
  }

  // Loads what a round needs besides rows: lse and the slots, including their logits if no rows are read.
  __device__ __forceinline__ void load(const int32_t (&experts)[kSlots], Token& info, Slots& slots) const {
    info.own = info.first + token;
    info.unmasked = token < info.count && (op.token_mask == nullptr || op.token_mask[info.own] != 0);
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      slots.expert[s] = info.unmasked && experts[s] >= 0 && experts[s] < op.E ? experts[s] : -1;
      slots.gradient[s] = 0.0f;
      slots.value[s] = -INFINITY;
      if (slots.expert[s] >= 0) {
        const size_t place = size_t{info.own} * E + static_cast<unsigned>(slots.expert[s]);
        slots.gradient[s] = op.d_weights.data != nullptr
                                ? cuda::load(op.d_weights, int64_t{info.own} * K + lane + s * kLanes)
                                : cuda::load(op.d_probs, static_cast<int64_t>(place));
        if (!kReadsRows) slots.value[s] = load_float(op.logits, op.logits_dtype, static_cast<int64_t>(place));
      }
    }
    info.lse = 0.0f;
    info.d_lse = 0.0f;
    if (op.lse != nullptr && info.unmasked) info.lse = op.lse[info.own];
    if (kReadsRows && op.d_lse.data != nullptr && info.unmasked) info.d_lse = cuda::load(op.d_lse, info.own);
  }

  // z: the lane's logits, or zeros for a token that is masked or past the end. Also reads the logits of the slots.
  __device__ __forceinline__ void read_row(const Rows& rows, const Token& info, float (&z)[kItems],
                                           Slots& slots) const {
    rows.read(lane * kItems, z);
    if (__any_sync(kAllLanes, !info.unmasked)) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = info.unmasked ? z[i] : 0.0f;
    }
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      const float logit = rows.logit(token, static_cast<unsigned>(max(slots.expert[s], 0)));
      slots.value[s] = slots.expert[s] < 0 ? -INFINITY : logit;
    }
  }

  // Computes the softmax. lse, if known, serves as the shift: dividing by the sum cancels its rounding. If softmax is
  // the score function, replaces z by exponentials.
  __device__ __forceinline__ void compute_softmax(const Token& info, float (&z)[kItems], RowSums& row) const {
    row.softmax.shift = info.lse * kLog2E;
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
    row.nan_or_zero = sum - sum;
  }

  // Sums auxiliary scores, and their products with the cotangents. For elementwise score functions, replaces z by
  // slopes.
  __device__ __forceinline__ void sum_scores(float (&z)[kItems], RowSums& row) const {
    if (is_softmax) {
      for_cotangents([&](int i, float g) { row.dot = fmaf(z[i], g, row.dot); });
      row.dot = sum_lanes<kLanes>(row.dot) * row.softmax.factor;
      return;
    }
    float sum = 0.0f;
    const auto add = [&](const auto& compute_score) {
      for_cotangents([&](int i, float g) {
        const ScoreAndSlope both = compute_score(z[i]);
        z[i] = both.slope;
        sum += both.score;
        row.dot = fmaf(both.score, g, row.dot);
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

  // Converts the cotangents of the weights of a token's slots to those of their logits, without the terms that all
  // experts have in common (docs/semantics.md, router backward). Returns sum_R g s for raw softmax, which the gradient
  // of every expert needs; else 0.
  __device__ __forceinline__ float slot_gradients(const RowSums& row, Slots& slots) const {
    float weight[kSlots];
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      slots.gradient[s] *= op.scaling_factor;
      weight[s] = slots.value[s];
    }
    const float inverse = is_softmax ? weigh_slots<AB_SOFTMAX, kLanes>(op.score_function, op.normalize, row.softmax,
                                                                       row.nan_or_zero, slots.expert, weight)
                                     : weigh_slots<AB_SIGMOID, kLanes>(op.score_function, op.normalize, row.softmax,
                                                                       row.nan_or_zero, slots.expert, weight);
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

  // The terms of any expert, with G the cotangent of its auxiliary score:
  //   d_e = s_e (G_e - sum G s + d_lse - sum_R g s), s = softmax(z): auxiliary scores, lse and raw weights.
  __device__ __forceinline__ float through_softmax(const RowSums& row, float power, float g) const {
    return power * fmaf(g, row.softmax.factor, row.shift);
  }
  // d_e = s'_e (G_e - sum G s / S) / S: auxiliary scores of the elementwise score functions.
  __device__ __forceinline__ float through_score(const RowSums& row, float slope, float g) const {
    return (g - row.dot) * row.inverse * slope;
  }

  // Converts the exponentials, slopes or logits in z to gradients.
  __device__ __forceinline__ void write_row(const Rows& rows, const RowSums& row, bool unmasked,
                                            float (&z)[kItems]) const {
    if (is_softmax && op.auxiliary) {
      for_cotangents([&](int i, float g) { z[i] = unmasked ? through_softmax(row, z[i], g) : 0.0f; });
    } else if (op.auxiliary) {
      for_cotangents([&](int i, float g) { z[i] = unmasked ? through_score(row, z[i], g) : 0.0f; });
    } else {
      const bool is_zero = !unmasked || !is_softmax || !op.softmax_rows;
#pragma unroll
      for (int i = 0; i < kItems; ++i) z[i] = is_zero ? 0.0f : through_softmax(row, z[i], 0.0f);
    }
    if (!is_softmax && op.softmax_rows) add_lse(rows, row, unmasked, z);
    rows.write(z);
  }
  // Adds the gradient of lse with an elementwise score function. This is rare, so logits are read again one by one.
  __device__ __forceinline__ void add_lse(const Rows& rows, const RowSums& row, bool unmasked,
                                          float (&z)[kItems]) const {
#pragma unroll
    for (unsigned i = 0; i < kItems; ++i) {
      const unsigned expert = lane * kItems + i;
      if (unmasked && expert < E) z[i] += through_softmax(row, row.softmax.power(rows.logit(token, expert)), 0.0f);
    }
  }
  // Returns the sum of the terms above for one expert with logit z.
  __device__ __forceinline__ float expert_gradient(const RowSums& row, unsigned expert, float z) const {
    const float g = op.auxiliary ? cotangents()[cotangent_place(expert)] : 0.0f;
    float d = 0.0f;
    if (op.softmax_rows) d = through_softmax(row, row.softmax.power(z), is_softmax ? g : 0.0f);
    if (!is_softmax && op.auxiliary) d += through_score(row, elementwise_slope(op.score_function, z), g);
    return d;
  }

  // Whether an expert was selected twice, which is possible in a replay. Each lane compares its slots with those of the
  // next kLanes / 2 lanes, so every pair of lanes is covered.
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

  // If slots have the same expert, each of them gets the sum over all, in slot order, and writes the same value.
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

  // Overwrites the rows' entries of the slots' experts with their whole gradients.
  __device__ __forceinline__ void write_slots(const Rows& rows, const RowSums& row, const Slots& slots) const {
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      if (slots.expert[s] < 0) continue;
      const auto e = static_cast<unsigned>(slots.expert[s]);
      float d = slots.gradient[s];
      if constexpr (kReadsRows) d += expert_gradient(row, e, slots.value[s]);
      rows.set(token, e, d);
    }
  }

  // Processes a round whose loads have been issued and whose logits have arrived.
  __device__ __forceinline__ void compute(const Rows& rows, const Token& info, Slots& slots) const {
    float z[kItems];
    RowSums row;
    row.nan_or_zero = info.lse - info.lse;
    if constexpr (kReadsRows) {
      read_row(rows, info, z, slots);
      if (op.softmax_rows || (is_softmax && op.lse == nullptr)) compute_softmax(info, z, row);
      if (op.auxiliary) sum_scores(z, row);
    }
    const float raw = op.weighted ? slot_gradients(row, slots) : 0.0f;
    row.shift = (info.d_lse - raw - (is_softmax ? row.dot : 0.0f)) * row.softmax.factor;
    __syncwarp();  // the logits of the slots have been read
    if constexpr (kReadsRows) {
      write_row(rows, row, info.unmasked, z);
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

// What a block of `route_backward` does.
template <Scores kScores, int kSize, int kLanes, int kItems, int kSlots, bool kReadsRows>
__device__ __forceinline__ void route_backward_block(const BackwardCall& call) {
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
  const unsigned step = blockDim.x / kLanes;  // tokens per round of the block
  unsigned begin = warp_index() * kTokens;    // the warp's first token, relative to block_begin
  Rows rows(gradients.memory, gradients.E, call.logits_are_aligned, op.logits_dtype);
  Rows next_rows = rows.at(rows.address() + (kReadsRows ? rows.bytes() : 0));
  const unsigned row_bytes = gradients.E * rows.element_size();
  const unsigned out_row_bytes = gradients.E * (op.d_logits_dtype == AB_FLOAT32 ? 4 : 2);
  const char* logits = static_cast<const char*>(op.logits) + (block_begin + begin) * row_bytes;

  // Loads are issued ahead of their rounds: rows by one round, the data of slots too if that is faster, and their
  // experts by one round more.
  int32_t experts[kSlots];
  typename Gradients::Token next_info{};
  typename Gradients::Slots next_slots;
  const auto fetch_experts = [&](unsigned from) {
    gradients.fetch_experts(static_cast<unsigned>(block_begin) + from + gradients.token,
                            from + gradients.token < block_tokens, experts);
  };
  const auto load_round = [&](unsigned from) {
    next_info.first = static_cast<unsigned>(block_begin) + from;
    next_info.count = min(block_tokens - from, kTokens);
    gradients.load(experts, next_info, next_slots);
  };
  const auto start_rows = [&](const Rows& to, unsigned from) {
    if (!kReadsRows) return;
    if (from < block_tokens) {
      to.start(logits, min(block_tokens - from, kTokens));
    } else {
      end_copy_group();  // an empty group, because groups are counted
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
    const typename Gradients::Token info = next_info;
    typename Gradients::Slots slots = next_slots;
    if (begin + step < block_tokens) {
      if (kAhead) load_round(begin + step);
      fetch_experts(begin + (kAhead ? 2 : 1) * step);
    }
    start_rows(next_rows, begin + step);
    if (kReadsRows) wait_for_copies<1>();
    gradients.load_own_cotangents(info);
    __syncwarp();
    gradients.compute(rows, info, slots);
    char* const out = static_cast<char*>(op.d_logits) + size_t{info.first} * out_row_bytes;
    if (op.d_logits_dtype == op.logits_dtype) {
      rows.copy_out(out, info.count, call.gradients_are_aligned);
    } else if (op.d_logits_dtype == AB_BFLOAT16) {
      rows.template copy_out_rounded<BFloat16>(out, info.count, call.gradients_are_aligned);
    } else {
      rows.template copy_out_rounded<Float16>(out, info.count, call.gradients_are_aligned);
    }
    __syncwarp();
    const Rows used = rows;
    rows = next_rows;
    next_rows = used;
  }
}

template <Scores kScores, int kSize, int kLanes, int kItems, int kSlots, bool kReadsRows>
__global__ void __launch_bounds__(kWarps* kWarp, blocks_per_sm(kScores, kSize, kSlots, kReadsRows))
    route_backward(const __grid_constant__ BackwardCall call) {
  if constexpr (has_logit_size<kSize>()) {
    route_backward_block<kScores, kSize, kLanes, kItems, kSlots, kReadsRows>(call);
  } else {
    fail_without_code();
  }
}

}  // namespace
}  // namespace anabranch::cuda
