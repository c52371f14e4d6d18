// ab_cuda_router_forward: selects and launches a variant of `route` (route.cuh), which reads the logits once; or
// route_generic (forward_many_experts.cuh), which reads them 3 to 5 times, if no variant fits the shape. Quantile
// balancing reads them once more (quantile.cu).
#include <algorithm>

#include "anabranch/cuda.h"
#include "core/entry.h"
#include "core/range.h"
#include "core/tensor.h"
#include "router/check.h"
#include "router/cuda/forward.cuh"
#include "router/cuda/forward_many_experts.cuh"
#include "router/cuda/outputs.cuh"
#include "router/cuda/quantile.cuh"

namespace anabranch::cuda {
namespace {

// ranks: experts per token that the selection sorts. candidates: experts per token that it collects (filter.cuh).
SharedLayout lay_out_shared(const RouterForward& op, int lanes, int items, int row_bytes, int ranks, int candidates,
                            int warps) {
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
  s.first_warp = (used + 127) / 128 * 128;
  used = 0;
  s.rows = take(row_bytes);
  s.sums = take(op.score_sum != nullptr ? kWarp * items * 4 : 0);
  s.selected = take(tokens * ranks * 4);
  s.experts = take(tokens * op.K * 4);
  s.values = take(tokens * op.K * 4);
  s.list = take(tokens * candidates * 2);
  s.candidates = take(tokens * candidates * 4);
  s.keys = take(E * 4);
  s.groups = take(op.num_groups * 4);
  s.map = take(tokens * static_cast<int>(map_row_bytes(op)));
  s.warp = (used + 127) / 128 * 128;
  s.total = s.first_warp + warps * s.warp;
  return s;
}

constexpr int kFewWarps = 4;  // per block, for few tokens

// The number of warps of a block, each of which processes `tokens` tokens at a time. If each sequence fits in one
// block, its statistics need no second kernel.
int num_warps(const RouterForward& op, int tokens) {
  if (op.T > TokenTiles::kFewTokens) return kMaxWarps;
  const int64_t sequence_tokens = op.T / std::max<int64_t>(op.blocks.sequences, 1);
  const bool statistics = op.tokens_per_expert != nullptr || op.score_sum != nullptr;
  const bool needs_max_warps = sequence_tokens > kFewWarps * tokens && sequence_tokens <= kMaxWarps * tokens;
  return statistics && needs_max_warps ? kMaxWarps : kFewWarps;
}

// The kernel for a call; no kernel if route_generic must handle it.
struct Choice {
  RouteVariant::Kernels kernels;
  bool always_exact = false;  // no kernel supports such groups: all tokens take the exact path
  int lanes = kWarp;
  int items = 0;
  int ranks = 0;
  int candidates = 0;
  int warps = kMaxWarps;
};

RouteVariants select_variants(const RouterForward& op, bool by_score) {
  if (op.qb_histogram != nullptr) return balanced_variants();
  if (by_score) return biased_variants();
  return op.score_function == AB_SOFTMAX ? softmax_variants() : elementwise_variants();
}

Choice choose(const RouterForward& op, const Selection& selection) {
  const bool by_score = selection.by_score && op.needs_selection;
  const RouteVariants all = select_variants(op, by_score);
  const bool few = op.T <= TokenTiles::kVeryFewTokens;
  const RouteVariant* variant = few ? all.few : all.many;
  const RouteVariant* const end = variant + (few ? RouteVariants::kFew : RouteVariants::kMany);
  for (; variant != end; ++variant) {
    if (variant->lanes * variant->items < op.E) continue;
    int list = 0;
    while (list < RouteVariant::kLists &&
           (RouteVariant::list(list) < op.K || variant->kernels[list].any_size == nullptr))
      ++list;
    if (list == RouteVariant::kLists) continue;
    Choice choice{.kernels = variant->kernels[list], .lanes = variant->lanes, .items = variant->items};
    if (op.num_groups > 0 && op.needs_selection) {
      // Supported groups are whole numbers of lanes and are scored by at most their two best experts.
      choice.always_exact = variant->grouped.any_size == nullptr || op.K > RouteVariant::list(RouteVariant::kGrouped) ||
                            op.group_score_topk > 2 || variant->lanes * variant->items != op.E ||
                            variant->lanes % op.num_groups != 0;
      if (!choice.always_exact) {
        choice.kernels = variant->grouped;
        list = RouteVariant::kGrouped;
      }
    }
    choice.candidates = variant->candidates[list];
    choice.ranks = choice.candidates > 0 ? choice.candidates : RouteVariant::list(list);
    choice.warps = num_warps(op, kWarp / variant->lanes);
    return choice;
  }
  return {};
}

// The launch parameters of a checked call.
struct RouteLaunch {
  RouteCall call{};
  RouteVariant::Kernels kernels;  // empty: route_generic
  int warps = kMaxWarps;
};

ab_status prepare(const RouterForward& op, void* workspace, RouteLaunch* launch, size_t* workspace_bytes) {
  RouteCall& call = launch->call;
  call.op = op;
  call.selection = make_selection(op);
  call.rows_are_aligned = reinterpret_cast<uintptr_t>(op.logits) % kChunk == 0;
  call.dense_is_aligned =
      (reinterpret_cast<uintptr_t>(op.probs) | reinterpret_cast<uintptr_t>(op.routing_map)) % kChunk == 0;
  if (op.E > AB_CUDA_MAX_EXPERTS) {
    return error(AB_UNSUPPORTED, "logits: got %lld experts, expected at most %d on CUDA", static_cast<long long>(op.E),
                 AB_CUDA_MAX_EXPERTS);
  }
  const int size = static_cast<int>(dtype_size(op.logits_dtype));
  int tokens = 1;
  const Choice choice = choose(op, call.selection);
  call.always_exact = choice.always_exact;
  launch->kernels = choice.kernels;
  launch->warps = choice.warps;
  if (choice.kernels.any_size != nullptr) {
    const int stage_bytes = kWarp * choice.items * size;
    const auto lay_out = [&](int warps) {
      return lay_out_shared(op, choice.lanes, choice.items, 2 * stage_bytes, choice.ranks, choice.candidates, warps);
    };
    // Use fewer warps per block if that puts more warps on an SM: registers and shared memory limit the number of
    // blocks. Few tokens: one block per SM, on any device.
    const bool few = op.T <= TokenTiles::kFewTokens;
    const int shared_bytes = (few ? 97 : 227) << 10;
    constexpr int kReserved = 1 << 10;  // per block
    int max_resident = 0;
    for (int warps = launch->warps; warps >= kFewWarps; --warps) {
      const int blocks = std::min(few ? 1 : kBlocks, shared_bytes / (lay_out(warps).total + kReserved));
      if (warps * blocks > max_resident) {
        max_resident = warps * blocks;
        launch->warps = warps;
      }
    }
    call.shared = lay_out(launch->warps);
    tokens = kWarp / choice.lanes;
  } else {
    constexpr int kSharedBytes = 200 << 10;
    do {
      const int items = static_cast<int>((op.E + kWarp - 1) / kWarp);
      const int row_bytes = op.probs != nullptr ? static_cast<int>(op.E) * size + static_cast<int>(kChunk) : 0;
      call.shared = lay_out_shared(op, kWarp, items, row_bytes, 0, 0, launch->warps);
    } while (call.shared.total > kSharedBytes && (launch->warps /= 2) > 0);
    if (launch->warps == 0) {
      return error(AB_UNSUPPORTED,
                   "logits: got %lld experts with topk %d, expected sizes that fit in shared memory on CUDA",
                   static_cast<long long>(op.E), op.K);
    }
  }
  call.tiles = TokenTiles(op.T, op.blocks.sequences, static_cast<int64_t>(launch->warps) * tokens,
                          TokenTiles::kMultiprocessors * kBlocks);
  *workspace_bytes = place_partials(call.tiles, op.E, op.tokens_per_expert, op.score_sum, workspace, &call.partials);
  call.statistics_are_aligned =
      op.E % 4 == 0 &&
      (reinterpret_cast<uintptr_t>(call.partials.counts) | reinterpret_cast<uintptr_t>(call.partials.sums)) % kChunk ==
          0;
  if (op.qb_histogram != nullptr) {
    call.scales = reinterpret_cast<TokenScale*>(static_cast<char*>(workspace) + *workspace_bytes);
    *workspace_bytes += token_scale_bytes(op.T);
  }
  return ok();
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_router_forward_workspace(const ab_router_forward_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  RouterForward op;
  AB_RETURN_IF_ERROR(check_router_forward(args, &op));
  cuda::RouteLaunch route;
  return cuda::prepare(op, nullptr, &route, bytes);
}

ab_status ab_cuda_router_forward(const ab_router_forward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  const Range range(Phase::route);
  RouterForward op;
  AB_RETURN_IF_ERROR(check_router_forward(args, &op));
  cuda::RouteLaunch route;
  size_t bytes = 0;
  AB_RETURN_IF_ERROR(cuda::prepare(op, exec->workspace, &route, &bytes));
  AB_RETURN_IF_ERROR(check_workspace(exec, bytes));
  const cudaStream_t stream = cuda::stream_of(exec);
  const cuda::Launch shape{route.call.tiles.count(), route.warps * cuda::kWarp,
                           static_cast<size_t>(route.call.shared.total), stream, true};
  void (*kernel)(cuda::RouteCall) = cuda::route_generic;
  if (route.kernels.any_size != nullptr && shape.blocks > 0) {
    AB_RETURN_IF_ERROR(cuda::choose_by_size("router forward", route.kernels, dtype_size(op.logits_dtype), &kernel));
  }
  AB_RETURN_IF_ERROR(cuda::launch("router forward", kernel, shape, route.call));
  if (op.qb_histogram != nullptr) AB_RETURN_IF_ERROR(cuda::launch_count_thresholds(op, route.call.scales, stream));
  return cuda::add_block_statistics(route.call.tiles, op.E, route.call.partials, op.tokens_per_expert, op.score_sum,
                                    stream);
}

}  // extern "C"
