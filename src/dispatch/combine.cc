#include <algorithm>

#include "anabranch/dispatch.h"
#include "core/entry.h"
#include "dispatch/blocks.h"
#include "dispatch/check.h"
#include "dispatch/rows.h"

namespace anabranch {
namespace {

// The rows and weights of those slots of a token that have a row. Each thread has one, in its own cache lines, because
// it is written for every token.
struct TokenRows {
  int32_t* index;
  float* weights;

  static size_t bytes(int64_t K) {
    constexpr size_t kCacheLine = 64;
    return (static_cast<size_t>(K) * (sizeof(int32_t) + sizeof(float)) + kCacheLine - 1) / kCacheLine * kCacheLine;
  }
  TokenRows(void* workspace, int64_t K, int thread)
      : index(reinterpret_cast<int32_t*>(static_cast<char*>(workspace) + static_cast<size_t>(thread) * bytes(K))),
        weights(reinterpret_cast<float*>(index + K)) {}
};

size_t workspace_of(const GatherSum& sum, const ab_exec* exec) {
  return static_cast<size_t>(num_threads(exec)) * TokenRows::bytes(sum.maps.K);
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_combine_workspace(const ab_combine_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  GatherSum sum;
  AB_RETURN_IF_ERROR(check_combine(args, &sum));
  return report_workspace(workspace_of(sum, exec), bytes);
}

ab_status ab_combine(const ab_combine_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  GatherSum sum;
  AB_RETURN_IF_ERROR(check_combine(args, &sum));
  AB_RETURN_IF_ERROR(check_workspace(exec, workspace_of(sum, exec)));

  const RowKernels& kernels = AB_SELECT_ISA(kRows);
  const auto& [maps, rows, weights, out, addend] = sum;
  // Estimate of the rows that a token reads: one per slot, limited by the number of rows per token.
  const int64_t slots_with_row = std::min(maps.K, maps.R / std::max<int64_t>(maps.T, 1) + 1);
  const Blocks blocks(maps.T, out.bytes + addend.bytes + rows.bytes * slots_with_row);
  parallel_for(blocks.threads(exec), blocks.blocks(), [&](int64_t block, int thread) {
    const TokenRows token(exec->workspace, maps.K, thread);
    for (int64_t t = blocks.begin(block); t < blocks.end(block); ++t) {
      int64_t count = 0;
      for (int64_t slot = t * maps.K; slot < (t + 1) * maps.K; ++slot) {
        if (!maps.has_row(slot)) continue;
        token.index[count] = maps.row_of_slot[slot];
        token.weights[count++] = weights[slot];
      }
      const void* added = addend.data == nullptr ? nullptr : addend[t];
      kernels.sum(rows.data, rows.dtype, rows.D, token.index, token.weights, count, added, addend.dtype, out[t],
                  out.dtype);
    }
  });
  return ok();
}

}  // extern "C"
