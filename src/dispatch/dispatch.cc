#include <algorithm>
#include <cstring>

#include "anabranch/dispatch.h"
#include "core/entry.h"
#include "dispatch/blocks.h"
#include "dispatch/check.h"
#include "dispatch/rows.h"

namespace anabranch {
namespace {

struct SpreadOnThreads : Spread {
  const RowKernels& kernels = AB_SELECT_ISA(kRows);

  bool writes_rows() const { return to.data != nullptr && to.D > 0; }

  void write_row(int64_t t, int64_t slot, int64_t row) const {
    if (copies()) {
      std::memcpy(to[row], x[t], static_cast<size_t>(x.bytes));
    } else {
      kernels.scale(x[t], x.dtype, x.D, weights[slot], to[row], to.dtype);
    }
  }

  void spread_token(int64_t t) const {
    for (int64_t slot = t * maps.K; slot < (t + 1) * maps.K; ++slot) {
      const bool has_row = maps.has_row(slot);
      const int64_t row = has_row ? maps.row_of_slot[slot] : 0;
      if (products.data != nullptr) {
        products.set(slot, has_row ? kernels.dot(x[t], x.dtype, other[row], other.dtype, x.D) : 0.0f);
      }
      if (has_row && writes_rows() && maps.are_tied(slot, row)) write_row(t, slot, row);
    }
  }

  void clear_rows(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      if (!maps.is_filled(row)) std::memset(to[row], 0, static_cast<size_t>(to.bytes));
    }
  }

  void run(const ab_exec* exec) const {
    if (!writes_rows() && products.data == nullptr) return;
    const Blocks tokens(maps.T, x.bytes * (1 + maps.R / std::max<int64_t>(maps.T, 1)));
    const Blocks rows(writes_rows() ? maps.R : 0, to.bytes);
    parallel_for(tokens.threads(exec), tokens.blocks() + rows.blocks(), [&](int64_t block, int) {
      if (block < tokens.blocks()) {
        for (int64_t t = tokens.begin(block); t < tokens.end(block); ++t) spread_token(t);
      } else {
        block -= tokens.blocks();
        clear_rows(rows.begin(block), rows.end(block));
      }
    });
  }
};

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_dispatch(const ab_dispatch_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  SpreadOnThreads spread;
  AB_RETURN_IF_ERROR(check_dispatch(args, &spread));
  spread.run(exec);
  return ok();
}

ab_status ab_combine_backward(const ab_combine_backward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  SpreadOnThreads spread;
  AB_RETURN_IF_ERROR(check_combine_backward(args, &spread));
  spread.run(exec);
  return ok();
}

}  // extern "C"
