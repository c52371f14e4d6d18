// ab_cuda_router_backward: d_logits from the cotangents of weights, auxiliary scores and lse, written once.
//
// A warp takes 32 / kLanes neighbouring tokens at a time, as the forward kernel does: kLanes lanes hold the row of a
// token, kItems neighbouring experts each. What every expert gets (softmax terms, auxiliary scores) is computed from
// the logits in registers and takes their place in shared memory; a slot's lane computes all that its expert gets and
// puts it there. Where only selected experts get a gradient, rows are zeros and no row of logits is read.

#include "anabranch/cuda.h"
#include "balance/statistics.cuh"
#include "core/cuda/element.cuh"
#include "core/entry.h"
#include "core/tensor.h"
#include "router/backward.cuh"
#include "router/check.h"
#include "router/logit_size.cuh"
#include "router/row.cuh"
#include "router/staged_rows.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kWarps = 8;  // of a block

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

// Cotangents of the weights of a token's slots, in kLanes lanes, become those of their logits, as far as they come
// through the selected experts alone (semantics: router backward). value: z of each slot, -inf for expert -1.
// Returns sum_R g s for raw softmax, which every expert's gradient needs; else 0.
template <int kLanes, int kSlots>
__device__ __forceinline__ float slot_gradients(bool is_softmax, int32_t score_function, bool normalize,
                                                const RowSoftmax& softmax, float poison,
                                                const int32_t (&expert)[kSlots], const float (&value)[kSlots],
                                                float (&gradient)[kSlots]) {
  float weight[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) weight[s] = value[s];
  const float inverse =
      is_softmax ? weigh_slots<AB_SOFTMAX, kLanes>(score_function, normalize, softmax, poison, expert, weight)
                 : weigh_slots<AB_SIGMOID, kLanes>(score_function, normalize, softmax, poison, expert, weight);
  float dot = 0.0f;
  if (is_softmax || normalize) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) dot = fmaf(gradient[s], weight[s], dot);
    dot = sum_lanes<kLanes>(dot);
  }
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    if (is_softmax) {
      // normalised: dz_k = p_k (g_k - sum_R g p).  raw: dz_e = s_e ([e in R] g_e - sum_R g s).
      gradient[s] = weight[s] * (gradient[s] - (normalize ? dot : 0.0f));
    } else {
      // ds_k = (g_k - sum_R g_j s_j / S) / S, or g_k;  dz_k = ds_k s'(z_k)
      const float ds = normalize ? (gradient[s] - dot) * inverse : gradient[s];
      gradient[s] = expert[s] < 0 ? 0.0f : ds * elementwise_slope(score_function, value[s]);
    }
  }
  return is_softmax && !normalize ? dot : 0.0f;
}

__device__ __forceinline__ float load(const Cotangent& cotangent, int64_t i) {
  return load_float(cotangent.data, cotangent.dtype, i);
}

// Blocks of a multiprocessor that registers are shared out for. Without rows the more the better: as many as leave
// enough to a thread, and find room in shared memory.
constexpr int blocks_of(int size, int slots, bool reads_rows) {
  if (reads_rows) return slots == 1 ? 3 : 2;
  return slots > 1 ? 4 : size == 2 ? 8 : 5;
}

// kSize: logit_size.cuh. kReadsRows: some gradient needs the whole row. K <= kLanes * kSlots.
template <Scores kScores, int kSize, int kLanes, int kItems, int kSlots, bool kReadsRows>
__global__ void __launch_bounds__(kWarps* kWarp, blocks_of(kSize, kSlots, kReadsRows))
    route_backward(const __grid_constant__ BackwardCall call) {
  if constexpr (!has_logit_size<kSize>()) return fail_without_code();
  using Rows = StagedRows<kLanes, kItems, kSize>;
  constexpr unsigned kTokens = kWarp / kLanes;
  constexpr unsigned kStride = kItems + 4;  // 16-byte reads of neighbouring lanes fall into different banks
  extern __shared__ __align__(128) char shared[];
  const RouterBackward& op = call.op;
  const auto E = static_cast<unsigned>(op.E);
  const auto K = static_cast<unsigned>(op.K);
  const bool is_softmax = kScores == Scores::softmax || (kScores == Scores::any && op.score_function == AB_SOFTMAX);
  const unsigned lane = threadIdx.x % kLanes;
  const unsigned token = threadIdx.x % kWarp / kLanes;
  const unsigned first_item = lane * kItems;
  const unsigned block_memory = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  unsigned memory = block_memory + call.first_warp + warp_index() * call.warp;
  asm volatile("" : "+r"(memory));  // to be kept, not computed again
  const SharedArray<int32_t> slot_experts = SharedArray<int32_t>(memory + call.experts).from(token * K);
  const SharedArray<float> slot_values = SharedArray<float>(memory + call.gradients).from(token * K);

  let_next_kernel_start();
  wait_for_previous_kernel();

  // Cotangents of the auxiliary scores, where a lane finds those of its items: of score_sum, the same for all tokens of
  // the block; or each token's own, which come with its row.
  const bool has_sum = kReadsRows && op.d_score_sum.data != nullptr;
  const bool has_aux = kReadsRows && op.d_aux_scores.data != nullptr;
  const SharedArray<float> own_cotangents(memory + call.d_aux_scores);
  const auto cotangents =
      has_aux ? own_cotangents.from(token * kLanes * kStride) : SharedArray<float>(block_memory);  // of the token
  const auto cotangent_place = [](unsigned e) { return e / kItems * kStride + e % kItems; };
  if (has_sum) {
    const int64_t row = static_cast<int64_t>(blockIdx.x / call.tiles.blocks_per_sequence) * E;
#pragma unroll 1
    for (unsigned e = threadIdx.x; e < kLanes * kItems; e += blockDim.x) {
      cotangents.set(cotangent_place(e), e < E ? load(op.d_score_sum, row + e) : 0.0f);
    }
  }

  const int64_t block_begin = call.tiles.begin(blockIdx.x);
  const auto block_tokens = static_cast<unsigned>(call.tiles.end(blockIdx.x) - block_begin);
  const unsigned step = blockDim.x / kLanes;  // tokens of a round of the block
  unsigned begin = warp_index() * kTokens;    // of the warp's tokens, from block_begin on
  Rows rows(memory, E, call.logits_are_aligned, op.logits_dtype);
  Rows next_rows(memory + (kReadsRows ? rows.bytes() : 0), E, call.logits_are_aligned, op.logits_dtype);
  const unsigned row_bytes = E * rows.element_size();
  const char* logits = static_cast<const char*>(op.logits) + (block_begin + begin) * row_bytes;

  // Experts of the slots, a round ahead of their use.
  int32_t next_expert[kSlots];
  const auto fetch_experts = [&](unsigned from) {
    const unsigned t = static_cast<unsigned>(block_begin) + from + token;
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      const unsigned k = lane + s * kLanes;
      next_expert[s] = -1;
      if (op.weighted && k < K && from + token < block_tokens) next_expert[s] = op.experts[size_t{t} * K + k];
    }
  };
  if (begin < block_tokens) {
    if (kReadsRows) rows.start(logits, min(block_tokens - begin, kTokens));
    fetch_experts(begin);
  }
  __syncthreads();

#pragma unroll 1
  for (; begin < block_tokens; begin += step) {
    const auto first = static_cast<unsigned>(block_begin) + begin;
    const unsigned t = first + token;
    const unsigned count = min(block_tokens - begin, kTokens);
    const bool live = token < count && (op.token_mask == nullptr || op.token_mask[t] != 0);

    // Loads: what slots need from memory now, rows of logits and experts for the next round.
    int32_t expert[kSlots];
    float gradient[kSlots];  // of the weights, then of the logits
    float value[kSlots];     // logits
#pragma unroll
    for (unsigned s = 0; s < kSlots; ++s) {
      expert[s] = live && next_expert[s] >= 0 && next_expert[s] < op.E ? next_expert[s] : -1;
      gradient[s] = 0.0f;
      value[s] = -INFINITY;
      if (expert[s] >= 0) {
        const size_t place = size_t{t} * E + static_cast<unsigned>(expert[s]);
        gradient[s] = op.d_weights.data != nullptr ? load(op.d_weights, int64_t{t} * K + lane + s * kLanes)
                                                   : load(op.d_probs, static_cast<int64_t>(place));
        if (!kReadsRows) value[s] = load_float(op.logits, op.logits_dtype, static_cast<int64_t>(place));
      }
    }
    float lse = 0.0f;
    float d_lse = 0.0f;
    if (op.lse != nullptr && live) lse = op.lse[t];
    if (kReadsRows && op.d_lse.data != nullptr && live) d_lse = load(op.d_lse, t);
    const bool more = begin + step < block_tokens;
    if (more) fetch_experts(begin + step);
    if constexpr (kReadsRows) {
      if (more) {
        logits += step * row_bytes;
        next_rows.start(logits, min(block_tokens - begin - step, kTokens));
        wait_for_copies<1>();
      } else {
        wait_for_copies<0>();
      }
    }
    if (has_aux) {
      __syncwarp();  // those of the round before have been read
#pragma unroll 1
      for (unsigned place = lane_index(); place < kTokens * kLanes * kItems; place += kWarp) {
        const unsigned of = place / (kLanes * kItems);
        const unsigned e = place % (kLanes * kItems);
        const bool there = of < count && e < E;
        own_cotangents.set(of * kLanes * kStride + cotangent_place(e),
                           there ? load(op.d_aux_scores, static_cast<int64_t>(first + of) * E + e) : 0.0f);
      }
    }
    __syncwarp();

    // The row's sums: softmax with lse as the shift where it is known (dividing by the sum takes its rounding out), or
    // the other scores; and with the cotangents.
    float z[kItems];
    RowSoftmax softmax{0.0f, 1.0f};
    float poison = lse - lse;  // NaN where a row of softmax is broken
    float dot = 0.0f;          // sum of G s
    float inverse = 0.0f;      // of the sum of elementwise scores
    const auto for_cotangents = [&](auto&& take) {
#pragma unroll
      for (unsigned i = 0; i < kItems; i += 4) {
        const auto g = load_shared<float4>(cotangents.from(lane * kStride + i).address());
        take(i, g.x);
        take(i + 1, g.y);
        take(i + 2, g.z);
        take(i + 3, g.w);
      }
    };
    if constexpr (kReadsRows) {
      rows.read(first_item, z);
      if (__any_sync(kAllLanes, !live)) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) z[i] = live ? z[i] : 0.0f;
      }
#pragma unroll
      for (unsigned s = 0; s < kSlots; ++s) {
        const float logit = rows.logit(token, static_cast<unsigned>(max(expert[s], 0)));
        value[s] = expert[s] < 0 ? -INFINITY : logit;
      }
      if (op.softmax_rows || (is_softmax && op.lse == nullptr)) {
        softmax.shift = lse * kLog2E;
        if (op.lse == nullptr) {
          float top = z[0];
#pragma unroll
          for (int i = 1; i < kItems; ++i) top = fmaxf(top, z[i]);
          softmax.shift = max_lanes<kLanes>(top) * kLog2E;
        }
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const float power = softmax.power(z[i]);
          sum += power;
          if (is_softmax) z[i] = power;  // from here on z are powers
        }
        sum = sum_lanes<kLanes>(sum);
        softmax.factor = reciprocal(sum);
        poison = sum - sum;
      }
      if (op.auxiliary) {
        if (is_softmax) {
          for_cotangents([&](int i, float g) { dot = fmaf(z[i], g, dot); });
          dot = sum_lanes<kLanes>(dot) * softmax.factor;
        } else {
          float sum = 0.0f;
          for_cotangents([&](int i, float g) {
            const float s = elementwise_score(op.score_function, z[i]);
            sum += s;
            dot = fmaf(s, g, dot);
          });
          inverse = reciprocal(sum_lanes<kLanes>(sum) + kSumEpsilon);
          dot = sum_lanes<kLanes>(dot) * inverse;
        }
      }
    }

    float raw = 0.0f;
    if (op.weighted) {
#pragma unroll
      for (unsigned s = 0; s < kSlots; ++s) gradient[s] *= op.scaling_factor;
      raw =
          slot_gradients<kLanes>(is_softmax, op.score_function, op.normalize, softmax, poison, expert, value, gradient);
    }

    // d_e = s_e (G_e - sum G s + d_lse - sum_R g s), s = softmax(z): auxiliary scores, lse and raw weights.
    // d_e += s'_e (G_e - sum G s / S) / S: auxiliary scores of the other score functions.
    const float shift = (d_lse - raw - (is_softmax ? dot : 0.0f)) * softmax.factor;
    const auto of_row = [&](float z_or_power, float g) {
      float d = 0.0f;
      if (is_softmax) {
        if (op.softmax_rows) d = z_or_power * fmaf(g, softmax.factor, shift);
      } else {
        if (op.softmax_rows) d = softmax.power(z_or_power) * shift;
        if (op.auxiliary) d = fmaf((g - dot) * inverse, elementwise_slope(op.score_function, z_or_power), d);
      }
      return live ? d : 0.0f;
    };
    __syncwarp();  // logits of the slots have been read
    if constexpr (kReadsRows) {
      if (op.auxiliary) {
        for_cotangents([&](int i, float g) { z[i] = of_row(z[i], g); });
      } else {
#pragma unroll
        for (int i = 0; i < kItems; ++i) z[i] = of_row(z[i], 0.0f);
      }
      rows.write(z);
    } else {
      rows.clear();
    }
    __syncwarp();

    if (op.weighted) {
      // All that the slots' experts get. An expert that was selected twice (in a replay) would be written twice: each
      // slot leaves its number where it will write, and looks whether it is still there.
#pragma unroll
      for (unsigned s = 0; s < kSlots; ++s) {
        if (expert[s] >= 0) rows.set_bits(token, static_cast<unsigned>(expert[s]), lane + s * kLanes);
      }
      __syncwarp();
      bool repeated = false;
#pragma unroll
      for (unsigned s = 0; s < kSlots; ++s) {
        if (expert[s] < 0) continue;
        repeated |= rows.bits(token, static_cast<unsigned>(expert[s])) != lane + s * kLanes;
      }
      if (__any_sync(kAllLanes, repeated)) {
        // Sums over equal experts, in the order of slots.
#pragma unroll
        for (unsigned s = 0; s < kSlots; ++s) {
          const unsigned k = lane + s * kLanes;
          slot_experts.set_if(k < K, k, expert[s]);
          slot_values.set_if(k < K, k, gradient[s]);
        }
        __syncwarp();
#pragma unroll
        for (unsigned s = 0; s < kSlots; ++s) {
          gradient[s] = 0.0f;
          for (unsigned k = 0; k < K; ++k) {
            if (slot_experts[k] == expert[s]) gradient[s] += slot_values[k];
          }
        }
      }
      __syncwarp();
#pragma unroll
      for (unsigned s = 0; s < kSlots; ++s) {
        if (expert[s] < 0) continue;
        const auto e = static_cast<unsigned>(expert[s]);
        float d = gradient[s];
        if constexpr (kReadsRows) {
          const float g = op.auxiliary ? cotangents[cotangent_place(e)] : 0.0f;
          d += of_row(is_softmax ? softmax.power(value[s]) : value[s], g);
        }
        rows.set(token, e, d);
      }
      __syncwarp();
    }
    char* const out = static_cast<char*>(op.d_logits) + size_t{first} * row_bytes;
    rows.copy_out(out, count, call.gradients_are_aligned);
    __syncwarp();
    const Rows used = rows;
    rows = next_rows;
    next_rows = used;
  }
}

struct Variant {
  int lanes;
  int items;
  int slots;                               // of a lane
  KernelsBySize<BackwardCall> kernels[2];  // by whether rows are read
};

template <Scores kScores, int kLanes, int kItems, int kSlots, bool kReadsRows>
constexpr KernelsBySize<BackwardCall> by_size() {
  return {route_backward<Scores::any, 0, kLanes, kItems, kSlots, kReadsRows>,
          route_backward<kScores, 2, kLanes, kItems, kSlots, kReadsRows>,
          route_backward<kScores, 4, kLanes, kItems, kSlots, kReadsRows>};
}

// Where no rows are read, whether it is softmax is asked at run time, which costs 1%; a lane that works alone, 12%.
template <Scores kScores, int kLanes, int kItems, int kSlots>
constexpr Variant variant() {
  constexpr Scores kOfSlots = kLanes == 1 ? kScores : Scores::any;
  return {kLanes,
          kItems,
          kSlots,
          {by_size<kOfSlots, kLanes, kItems, kSlots, false>(), by_size<kScores, kLanes, kItems, kSlots, true>()}};
}

// The first that is wide enough and has room for the slots: for many tokens, and for so few that a warp a token does
// not fill the device.
template <Scores kScores>
constexpr Variant kFewTokens[] = {variant<kScores, 32, 8, 1>(), variant<kScores, 32, 32, 1>(),
                                  variant<kScores, 32, 32, 2>()};
template <Scores kScores>
constexpr Variant kVariants[] = {variant<kScores, 1, 8, 2>(),   variant<kScores, 2, 32, 4>(),
                                 variant<kScores, 4, 32, 2>(),  variant<kScores, 8, 32, 1>(),
                                 variant<kScores, 8, 32, 4>(),  variant<kScores, 16, 24, 1>(),
                                 variant<kScores, 16, 32, 1>(), variant<kScores, 16, 32, 2>(),
                                 variant<kScores, 32, 32, 1>(), variant<kScores, 32, 32, 2>()};

}  // namespace

ab_status launch_backward_rows(const RouterBackward& op, cudaStream_t stream, bool* launched) {
  const bool is_softmax = op.score_function == AB_SOFTMAX;
  BackwardCall call{};
  call.op = op;
  call.logits_are_aligned = reinterpret_cast<uintptr_t>(op.logits) % kChunk == 0;
  call.gradients_are_aligned = reinterpret_cast<uintptr_t>(op.d_logits) % kChunk == 0;
  // Softmax over the selected logits still has to tell whether the row is broken, from lse or from the row.
  const bool reads_rows = op.softmax_rows || op.auxiliary || (is_softmax && op.weighted && op.lse == nullptr);

  const int K = op.weighted ? op.K : 0;
  const auto find = [&](const auto& variants) -> const Variant* {
    for (const Variant& v : variants) {
      if (v.lanes * v.items >= op.E && v.lanes * v.slots >= K) return &v;
    }
    return nullptr;
  };
  const bool few = op.T <= TokenTiles::kFewTokens;
  const Variant* const variant =
      is_softmax ? (few ? find(kFewTokens<Scores::softmax>) : find(kVariants<Scores::softmax>))
                 : (few ? find(kFewTokens<Scores::elementwise>) : find(kVariants<Scores::elementwise>));
  *launched = variant != nullptr;
  if (variant == nullptr) return ok();
  const int size = static_cast<int>(dtype_size(op.logits_dtype));

  const int tokens = kWarp / variant->lanes;
  const auto rounded = [](int bytes) { return (bytes + 127) / 128 * 128; };
  const bool has_aux = op.d_aux_scores.data != nullptr;
  const int stride = (variant->items + 4) * 4;
  call.first_warp = op.d_score_sum.data != nullptr ? rounded(variant->lanes * stride) : 0;
  call.d_aux_scores = rounded(kWarp * variant->items * size * (reads_rows ? 2 : 1));
  call.experts = call.d_aux_scores + (has_aux ? rounded(kWarp * stride) : 0);
  call.gradients = call.experts + rounded(tokens * K * 4);
  call.warp = call.gradients + rounded(tokens * K * 4);
  // Blocks that read rows keep the next ones coming; the others have nothing to win from staying.
  const int64_t most_blocks = TokenTiles::kMultiprocessors * (reads_rows ? blocks_of(size, variant->slots, true) : 8);
  call.tiles = TokenTiles(op.T, op.blocks.sequences, int64_t{kWarps} * tokens, most_blocks);
  if (call.tiles.count() == 0) return ok();
  void (*kernel)(BackwardCall) = nullptr;
  AB_RETURN_IF_ERROR(
      choose_by_size("router backward", variant->kernels[reads_rows ? 1 : 0], static_cast<size_t>(size), &kernel));
  return launch(
      "router backward", kernel,
      {call.tiles.count(), kWarps * kWarp, static_cast<size_t>(call.first_warp + kWarps * call.warp), stream, true},
      call);
}

}  // namespace anabranch::cuda

using namespace anabranch;

namespace {

// For the experts of a selection that is given in another form.
size_t backward_workspace(const RouterBackward& op) {
  const bool converts = op.selection.data != nullptr && op.experts == nullptr;
  return converts ? static_cast<size_t>(op.T) * static_cast<size_t>(op.K) * sizeof(int32_t) : 0;
}

}  // namespace

extern "C" {

ab_status ab_cuda_router_backward_workspace(const ab_router_backward_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  RouterBackward op;
  AB_RETURN_IF_ERROR(check_router_backward(args, &op));
  return report_workspace(backward_workspace(op), bytes);
}

ab_status ab_cuda_router_backward(const ab_router_backward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  RouterBackward op;
  AB_RETURN_IF_ERROR(check_router_backward(args, &op));
  if (op.E > AB_CUDA_MAX_EXPERTS) {
    return error(AB_UNSUPPORTED, "logits: got %lld experts, expected at most %d on CUDA", static_cast<long long>(op.E),
                 AB_CUDA_MAX_EXPERTS);
  }
  const cudaStream_t stream = cuda::stream_of(exec);
  const size_t bytes = backward_workspace(op);
  AB_RETURN_IF_ERROR(check_workspace(exec, bytes));
  if (bytes > 0) {
    auto* const experts = static_cast<int32_t*>(exec->workspace);
    AB_RETURN_IF_ERROR(cuda::launch_read_selection(op, experts, stream));
    op.experts = experts;
  }
  bool launched = false;
  AB_RETURN_IF_ERROR(cuda::launch_backward_rows(op, stream, &launched));
  return launched ? ok() : cuda::launch_backward_wide(op, stream);
}

}  // extern "C"
