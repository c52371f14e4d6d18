// ab_cuda_router_forward: one read of the logits gives every output. Chooses and launches a variant of `route`
// (forward.cuh), or route_wide where rows are too wide for registers.
#include "anabranch/cuda.h"
#include "core/tensor.h"
#include "router/check.h"
#include "router/forward.cuh"

namespace anabranch::cuda {
namespace {

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
  s.sorted = take(tokens * op.K * 4);
  s.keys = take(E * 4);
  s.groups = take(op.num_groups * 4);
  s.probs = take(op.probs != nullptr ? tokens * E * static_cast<int>(dtype_size(op.logits_dtype)) : 0);
  s.map = take(tokens * dense_map_bytes(op));
  s.warp = used;
  s.total = s.first_warp + warps * s.warp;
  return s;
}

// A warp a token, for any number of experts that shared memory holds. The selection uses the keys' place, which takes
// the warp's sums at the end, so auxiliary scores are summed at sums_offset of the warp's piece meanwhile.
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

constexpr int64_t kFewTokens = 2048;

RouteVariant choose_variant(const RouterForward& op) {
  const RouteVariants all = op.score_function == AB_SOFTMAX   ? softmax_variants()
                            : op.score_function == AB_SIGMOID ? sigmoid_variants()
                                                              : sqrtsoftplus_variants();
  const bool few = op.T <= kFewTokens && op.E > 16;
  const RouteVariant* variant = few ? all.few : all.many;
  while (variant->lanes * variant->items < op.E) ++variant;
  return *variant;
}

// Whether groups are whole numbers of a variant's lanes, and few enough experts make a group's score.
bool groups_fit(const RouterForward& op, const RouteVariant& v) {
  if (op.K > kShortList || op.K / op.group_topk > 2 || v.grouped == nullptr) return false;
  return v.lanes * v.items == op.E && v.lanes % op.num_groups == 0;
}

// How a checked call is launched.
struct RouteLaunch {
  Call call{};
  void (*kernel)(Call) = nullptr;  // nullptr: route_wide
  int warps = kWarps;
  int sums_offset = 0;  // of route_wide
};

ab_status prepare(const RouterForward& op, void* workspace, RouteLaunch* launch, size_t* workspace_bytes) {
  Call& call = launch->call;
  call.op = op;
  call.selection = selection_of(op);
  if (op.E > AB_CUDA_MAX_EXPERTS) {
    return error(AB_UNSUPPORTED, "logits: got %lld experts, expected at most %d on CUDA", static_cast<long long>(op.E),
                 AB_CUDA_MAX_EXPERTS);
  }
  int tokens = 1;
  if (op.E <= kMostRegisters) {
    const RouteVariant v = choose_variant(op);
    const bool grouped = op.num_groups > 0 && op.wants_selection;
    call.only_exact = op.K > kLongList || (grouped && !groups_fit(op, v));
    launch->kernel = grouped && !call.only_exact ? v.grouped : op.K <= kShortList ? v.short_list : v.long_list;
    call.vectors = rows_are_vectors(op.logits, op.E, dtype_size(op.logits_dtype));
    call.exact_keys = op.logits_dtype != AB_FLOAT32 && !call.selection.by_score;
    call.shared = lay_out_shared(op, v.lanes, v.items, kWarps);
    tokens = kWarp / v.lanes;
  } else {
    constexpr int kSharedBytes = 200 << 10;
    do {
      call.shared = lay_out_shared(op, kWarp, static_cast<int>((op.E + kWarp - 1) / kWarp), launch->warps);
      launch->sums_offset = call.shared.warp;
      call.shared.warp += op.score_sum != nullptr ? (static_cast<int>(op.E) * 4 + 15) / 16 * 16 : 0;
      call.shared.total = call.shared.first_warp + launch->warps * call.shared.warp;
    } while (call.shared.total > kSharedBytes && (launch->warps /= 2) > 0);
    if (launch->warps == 0) {
      return error(AB_UNSUPPORTED, "logits: got %lld experts with topk %d, which shared memory cannot hold on CUDA",
                   static_cast<long long>(op.E), op.K);
    }
  }
  call.tiles = TokenTiles(op.T, op.blocks.sequences, static_cast<int64_t>(launch->warps) * tokens);
  *workspace_bytes = place_partials(call.tiles, op.E, op.tokens_per_expert, op.score_sum, workspace, &call.partials);
  return ok();
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_router_forward_workspace(const ab_router_forward_args* args, const ab_exec*, size_t* bytes) {
  RouterForward op;
  AB_RETURN_IF_ERROR(check_router_forward(args, &op));
  cuda::RouteLaunch route;
  return cuda::prepare(op, nullptr, &route, bytes);
}

ab_status ab_cuda_router_forward(const ab_router_forward_args* args, const ab_exec* exec) {
  RouterForward op;
  AB_RETURN_IF_ERROR(check_router_forward(args, &op));
  cuda::RouteLaunch route;
  size_t bytes = 0;
  AB_RETURN_IF_ERROR(cuda::prepare(op, exec == nullptr ? nullptr : exec->workspace, &route, &bytes));
  AB_RETURN_IF_ERROR(check_workspace(exec, bytes));
  const cudaStream_t stream = cuda::stream_of(exec);
  const cuda::Launch shape{route.call.tiles.count(), route.warps * cuda::kWarp,
                           static_cast<size_t>(route.call.shared.total), stream};
  if (route.kernel != nullptr) {
    AB_RETURN_IF_ERROR(cuda::launch("router forward", route.kernel, shape, route.call));
  } else {
    AB_RETURN_IF_ERROR(cuda::launch("router forward", cuda::route_wide, shape, route.call, route.sums_offset));
  }
  return cuda::add_partials(route.call.tiles, op.E, route.call.partials, op.tokens_per_expert, op.score_sum, stream);
}

}  // extern "C"
