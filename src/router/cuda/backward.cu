// ab_cuda_router_backward: launches a variant of `route_backward` (route_backward.cuh), which holds rows in registers,
// or the generic kernel if no variant fits (backward_many_experts.cu).

#include "anabranch/cuda.h"
#include "core/entry.h"
#include "core/range.h"
#include "core/tensor.h"
#include "router/check.h"
#include "router/cuda/backward.cuh"
#include "router/cuda/route_backward.cuh"

namespace anabranch::cuda {
namespace {

struct Variant {
  int lanes;
  int items;
  int slots;                               // per lane
  KernelsBySize<BackwardCall> kernels[2];  // index: whether rows are read
};

template <Scores kScores, int kLanes, int kItems, int kSlots, bool kReadsRows>
constexpr KernelsBySize<BackwardCall> by_size() {
  return {route_backward<Scores::any, 0, kLanes, kItems, kSlots, kReadsRows>,
          route_backward<kScores, 2, kLanes, kItems, kSlots, kReadsRows>,
          route_backward<kScores, 4, kLanes, kItems, kSlots, kReadsRows>};
}

// A kernel that reads no rows tests for softmax at run time, which costs 1%. With one lane per token it would cost 12%,
// so these kernels are specialised.
template <Scores kScores, int kLanes, int kItems, int kSlots>
constexpr Variant variant() {
  constexpr Scores kSlotScores = kLanes == 1 ? kScores : Scores::any;
  return {kLanes,
          kItems,
          kSlots,
          {by_size<kSlotScores, kLanes, kItems, kSlots, false>(), by_size<kScores, kLanes, kItems, kSlots, true>()}};
}

// The first variant that has enough items and slots is used: from kVariants for many tokens, from kFewTokens if one
// warp per token does not fill the device. Four slots and 32 items per lane would spill registers, except for softmax.
//
// Time without a variant, relative to the time with it (one H200, bfloat16, T = 4096 to 65536):
//   1 lane of 8 experts                              1.4 to 4.3 at E = 8
//   16 lanes of 24                                   1.03 to 1.4 at E = 384
//   8 lanes of 32, 4 slots; 16 lanes of 16, 2 slots  0.8 to 1.8 at E = 256, K = 16 and 32
//   16 and 32 lanes of 32, 1 slot                    0.95 to 1.3 at E = 512 and 1024
template <Scores kScores>
constexpr Variant kFewTokens[] = {variant<kScores, 32, 8, 1>(), variant<kScores, 32, 32, 1>(),
                                  variant<kScores, 32, 32, 2>()};
template <Scores kScores>
constexpr int kWidthScale = kScores == Scores::softmax ? 1 : 2;
template <Scores kScores>
constexpr Variant kVariants[] = {
    variant<kScores, 1, 8, 2>(),
    variant<kScores, 2 * kWidthScale<kScores>, 32 / kWidthScale<kScores>, 4 / kWidthScale<kScores>>(),
    variant<kScores, 4, 32, 2>(),
    variant<kScores, 8, 32, 1>(),
    variant<kScores, 8 * kWidthScale<kScores>, 32 / kWidthScale<kScores>, 4 / kWidthScale<kScores>>(),
    variant<kScores, 16, 24, 1>(),
    variant<kScores, 16, 32, 1>(),
    variant<kScores, 16, 32, 2>(),
    variant<kScores, 32, 32, 1>(),
    variant<kScores, 32, 32, 2>()};

}  // namespace

ab_status launch_backward_rows(const RouterBackward& op, cudaStream_t stream, bool* launched) {
  const bool is_softmax = op.score_function == AB_SOFTMAX;
  BackwardCall call{};
  call.op = op;
  call.logits_are_aligned = reinterpret_cast<uintptr_t>(op.logits) % kChunk == 0;
  call.gradients_are_aligned = reinterpret_cast<uintptr_t>(op.d_logits) % kChunk == 0;
  // Even softmax over the selected logits must detect NaN and infinities in the row, through lse or the row itself.
  const bool reads_rows = op.softmax_rows || op.auxiliary || (is_softmax && op.weighted && op.lse == nullptr);

  const int K = op.weighted ? op.K : 0;
  const auto find = [&](const auto& variants) -> const Variant* {
    for (const Variant& v : variants) {
      if (v.lanes * v.items >= op.E && v.lanes * v.slots >= K) return &v;
    }
    return nullptr;
  };
  const bool few = op.T <= TokenTiles::kVeryFewTokens;
  const Variant* const variant =
      is_softmax ? (few ? find(kFewTokens<Scores::softmax>) : find(kVariants<Scores::softmax>))
                 : (few ? find(kFewTokens<Scores::elementwise>) : find(kVariants<Scores::elementwise>));
  *launched = variant != nullptr;
  if (variant == nullptr) return ok();
  const int size = static_cast<int>(dtype_size(op.logits_dtype));

  const int tokens = kWarp / variant->lanes;
  const int warps = op.T <= TokenTiles::kFewTokens ? kFewWarps : kWarps;
  const auto rounded = [](int bytes) { return (bytes + 127) / 128 * 128; };
  const bool has_aux = op.d_aux_scores.data != nullptr;
  const int stride = (variant->items + 4) * 4;
  call.first_warp = op.d_score_sum.data != nullptr ? rounded(variant->lanes * stride) : 0;
  call.d_aux_scores = rounded(kWarp * variant->items * size * (reads_rows ? 2 : 1));
  call.experts = call.d_aux_scores + (has_aux ? rounded(kWarp * stride) : 0);
  call.gradients = call.experts + rounded(tokens * K * 4);
  call.warp = call.gradients + rounded(tokens * K * 4);
  // Blocks that read rows are persistent, to prefetch the next rows; the others gain nothing from that.
  const int64_t max_blocks =
      TokenTiles::kMultiprocessors *
      (reads_rows ? blocks_per_sm(is_softmax ? Scores::softmax : Scores::elementwise, size, variant->slots, true) : 8);
  call.tiles = TokenTiles(op.T, op.blocks.sequences, int64_t{warps} * tokens, max_blocks);
  if (call.tiles.count() == 0) return ok();
  void (*kernel)(BackwardCall) = nullptr;
  AB_RETURN_IF_ERROR(
      choose_by_size("router backward", variant->kernels[reads_rows ? 1 : 0], static_cast<size_t>(size), &kernel));
  return launch(
      "router backward", kernel,
      {call.tiles.count(), warps * kWarp, static_cast<size_t>(call.first_warp + warps * call.warp), stream, true},
      call);
}

}  // namespace anabranch::cuda

using namespace anabranch;

namespace {

// Bytes for the converted selection, if it is not given as int32 indices.
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
  const Range range(Phase::route_backward);
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
  return launched ? ok() : cuda::launch_backward_generic(op, stream);
}

}  // extern "C"
