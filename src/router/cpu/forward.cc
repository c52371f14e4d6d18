// ab_router_forward: processes blocks of tokens in parallel, then adds their statistics in order.
#include "router/forward.h"

#include <cstring>

#include "balance/check.h"
#include "core/entry.h"
#include "core/tensor.h"
#include "core/threads.h"
#include "router/check.h"
#include "router/cpu/scratch.h"
#include "router/cpu/threads.h"

namespace anabranch {
namespace {

// Per-block statistics and per-thread scratch memory.
struct Workspace {
  int32_t* counts = nullptr;      // [blocks, E]
  float* score_sum = nullptr;     // [blocks, E]
  int32_t* histograms = nullptr;  // [threads - 1][E, qb_bins]; the first thread uses qb_histogram
  char* scratch = nullptr;        // [threads][scratch_size]
  size_t scratch_size;
  size_t size;

  Workspace(const RouterForward& op, int threads, void* memory) {
    Scratch pieces(memory);
    const int64_t statistics = op.blocks.count() * op.E;
    scratch_size = (AB_SELECT_ISA(kRouterForward).scratch_size(op) + 63) / 64 * 64;
    scratch = pieces.take<char>(static_cast<int64_t>(scratch_size) * threads);
    if (op.tokens_per_expert != nullptr) counts = pieces.take<int32_t>(statistics);
    if (op.score_sum != nullptr) score_sum = pieces.take<float>(statistics);
    histograms = pieces.take<int32_t>((threads - 1) * op.E * op.qb_bins);
    size = pieces.used();
  }
};

// One histogram per thread, so that threads do not wait for each other. Counts are integers, so the result does not
// depend on which thread processed which token.
class Histograms {
 public:
  Histograms(const RouterForward& op, int threads, int32_t* others) : op_(op), threads_(threads), others_(others) {
    if (op.qb_histogram == nullptr) return;
    const size_t bytes = static_cast<size_t>(op.qb_bins) * sizeof(int32_t);
    parallel_for(threads, op.E * threads, [&](int64_t row, int) {
      std::memset(histogram(static_cast<int>(row % threads)) + row / threads * op.qb_bins, 0, bytes);
    });
  }

  int32_t* histogram(int thread) const {
    return thread == 0 ? op_.qb_histogram : others_ + (thread - 1) * op_.E * op_.qb_bins;
  }

  void add_up() const {
    if (op_.qb_histogram == nullptr) return;
    parallel_for(threads_, op_.E, [&](int64_t e, int) {
      int32_t* const sum = op_.qb_histogram + e * op_.qb_bins;
      for (int thread = 1; thread < threads_; ++thread) {
        const int32_t* const own = histogram(thread) + e * op_.qb_bins;
        for (int64_t bin = 0; bin < op_.qb_bins; ++bin) sum[bin] += own[bin];
      }
    });
  }

 private:
  const RouterForward& op_;
  int threads_;
  int32_t* others_;
};

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_router_forward_workspace(const ab_router_forward_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  RouterForward op;
  AB_RETURN_IF_ERROR(check_router_forward(args, &op));
  return report_workspace(Workspace(op, router_threads(exec, op.T, op.E), nullptr).size, bytes);
}

ab_status ab_router_forward(const ab_router_forward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  RouterForward op;
  AB_RETURN_IF_ERROR(check_router_forward(args, &op));
  const int threads = router_threads(exec, op.T, op.E);
  AB_RETURN_IF_ERROR(check_workspace(exec, Workspace(op, threads, nullptr).size));

  const Workspace workspace(op, threads, exec->workspace);
  const RouterForwardKernels& kernels = AB_SELECT_ISA(kRouterForward);
  const Histograms histograms(op, threads, workspace.histograms);
  parallel_for(threads, op.blocks.count(), [&](int64_t block, int thread) {
    int32_t* counts = workspace.counts == nullptr ? nullptr : workspace.counts + block * op.E;
    float* score_sum = workspace.score_sum == nullptr ? nullptr : workspace.score_sum + block * op.E;
    kernels.route(op, op.blocks.begin(block), op.blocks.end(block), counts, score_sum,
                  op.qb_histogram == nullptr ? nullptr : histograms.histogram(thread),
                  workspace.scratch + static_cast<size_t>(thread) * workspace.scratch_size);
  });
  histograms.add_up();
  if (op.tokens_per_expert != nullptr) add_block_counts(workspace.counts, op.blocks, op.E, op.tokens_per_expert);
  if (op.score_sum != nullptr) add_block_sums(workspace.score_sum, op.blocks, op.E, op.score_sum);
  return ok();
}

}  // extern "C"
