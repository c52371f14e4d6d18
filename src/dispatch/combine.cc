#include <algorithm>

#include "anabranch/dispatch.h"
#include "dispatch/elements.h"
#include "dispatch/maps.h"
#include "dispatch/rows.h"

namespace anabranch {
namespace {

ab_status parse(const ab_combine_args* args, Maps* maps) {
  AB_RETURN_IF_ERROR(check_struct("ab_combine_args", args, args == nullptr ? 0 : args->size, sizeof(*args)));
  AB_RETURN_IF_ERROR(check_tensor("rows", args->rows, kFloats, {{"R"}, {"D"}}));
  maps->R = args->rows->shape[0];
  AB_RETURN_IF_ERROR(check_num_rows("rows", maps->R));
  AB_RETURN_IF_ERROR(check_row_of_slot(args->row_of_slot, -1, {"K"}, maps));
  AB_RETURN_IF_ERROR(check_optional("weights", args->weights, kFloats, {{"T", maps->T}, {"K", maps->K}}));
  return check_tensor("out", args->out, kFloats, {{"T", maps->T}, {"D", args->rows->shape[1]}});
}

// Rows and weights of one token's slots that have a row; one of it a thread.
struct TokenRows {
  int32_t* index;
  float* weights;

  static size_t bytes(int64_t K) { return static_cast<size_t>(K) * (sizeof(int32_t) + sizeof(float)); }
  TokenRows(void* workspace, int64_t K, int thread)
      : index(reinterpret_cast<int32_t*>(static_cast<char*>(workspace) + static_cast<size_t>(thread) * bytes(K))),
        weights(reinterpret_cast<float*>(index + K)) {}
};

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_combine_workspace(const ab_combine_args* args, const ab_exec* exec, size_t* bytes) {
  Maps maps;
  AB_RETURN_IF_ERROR(parse(args, &maps));
  *bytes = static_cast<size_t>(num_threads(exec)) * TokenRows::bytes(maps.K);
  return ok();
}

ab_status ab_combine(const ab_combine_args* args, const ab_exec* exec) {
  Maps maps;
  AB_RETURN_IF_ERROR(parse(args, &maps));
  size_t needed = 0;
  AB_RETURN_IF_ERROR(ab_combine_workspace(args, exec, &needed));
  AB_RETURN_IF_ERROR(check_workspace(exec, needed));

  const RowKernels& kernels = AB_SELECT_ISA(kRows);
  const Rows rows(args->rows);
  const Rows out(args->out);
  // A token reads a row for each of its slots, as far as there are rows.
  const Blocks blocks(maps.T, out.bytes + rows.bytes * std::min(maps.K, maps.R / std::max<int64_t>(maps.T, 1) + 1));
  parallel_for(blocks.threads(exec), blocks.blocks(), [&](int64_t block, int thread) {
    const TokenRows token(exec->workspace, maps.K, thread);
    for (int64_t t = blocks.begin(block); t < blocks.end(block); ++t) {
      int64_t count = 0;
      for (int64_t slot = t * maps.K; slot < (t + 1) * maps.K; ++slot) {
        if (!maps.has_row(slot)) continue;
        token.index[count] = maps.row_of_slot[slot];
        token.weights[count++] = element(args->weights, slot);
      }
      kernels.sum(rows.data, rows.dtype, rows.D, token.index, token.weights, count, out[t], out.dtype);
    }
  });
  return ok();
}

}  // extern "C"
