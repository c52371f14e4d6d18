// Dispatch and the backward pass of combine: both copy every token to the rows of its slots, with or without a weight;
// the second also takes the product of the token with what stands in the row.
#include <cstring>

#include "anabranch/dispatch.h"
#include "dispatch/elements.h"
#include "dispatch/maps.h"
#include "dispatch/rows.h"

namespace anabranch {
namespace {

struct Spread {
  Maps maps;
  Rows x;                     // [T, D]
  const ab_tensor* weights;   // [T, K] or NULL
  Rows to;                    // [R, D]: weights[t, k] * x[t]; no data: not wanted
  Rows other;                 // [R, D], for products
  const ab_tensor* products;  // [T, K]: <x[t], other[row]>, or NULL
  const RowKernels& kernels = AB_SELECT_ISA(kRows);

  void write_row(int64_t t, int64_t slot, int64_t row) const {
    if (weights == nullptr && to.dtype == x.dtype) {
      std::memcpy(to[row], x[t], static_cast<size_t>(x.bytes));
    } else {
      kernels.scale(x[t], x.dtype, x.D, element(weights, slot), to[row], to.dtype);
    }
  }

  void spread_token(int64_t t) const {
    for (int64_t slot = t * maps.K; slot < (t + 1) * maps.K; ++slot) {
      const bool has_row = maps.has_row(slot);
      const int64_t row = has_row ? maps.row_of_slot[slot] : 0;
      if (products != nullptr) {
        set_element(products, slot, has_row ? kernels.dot(x[t], x.dtype, other[row], other.dtype, x.D) : 0.0f);
      }
      if (has_row && to.data != nullptr && maps.are_tied(slot, row)) write_row(t, slot, row);
    }
  }

  void clear_rows(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      if (!maps.is_filled(row)) std::memset(to[row], 0, static_cast<size_t>(to.bytes));
    }
  }

  void run(const ab_exec* exec) const {
    if (x.D == 0 && products == nullptr) return;
    const Blocks tokens(maps.T, x.bytes * (1 + maps.R / std::max<int64_t>(maps.T, 1)));
    const Blocks rows(to.data == nullptr ? 0 : maps.R, to.bytes);
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

ab_status check_maps(const ab_tensor* row_of_slot, const ab_tensor* slot_of_row, int64_t T, Maps* maps) {
  AB_RETURN_IF_ERROR(check_row_of_slot(row_of_slot, T, {"K"}, maps));
  return check_slot_of_row(slot_of_row, maps);
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_dispatch(const ab_dispatch_args* args, const ab_exec* exec) {
  AB_RETURN_IF_ERROR(check_struct("ab_dispatch_args", args, args == nullptr ? 0 : args->size, sizeof(*args)));
  const bool weighted = args->weights != nullptr;
  AB_RETURN_IF_ERROR(check_tensor("x", args->x, weighted ? kFloats : kAnyDtype, {{"T"}, {"D"}}));
  Maps maps;
  AB_RETURN_IF_ERROR(check_maps(args->row_of_slot, args->slot_of_row, args->x->shape[0], &maps));
  AB_RETURN_IF_ERROR(check_optional("weights", args->weights, kFloats, {{"T", maps.T}, {"K", maps.K}}));
  const Dtypes x_dtype = 1u << args->x->dtype;
  AB_RETURN_IF_ERROR(check_tensor("rows", args->rows, (x_dtype & kFloats) != 0 ? kFloats : x_dtype,
                                  {{"R", maps.R}, {"D", args->x->shape[1]}}));
  Spread{maps, Rows(args->x), args->weights, Rows(args->rows), Rows(), nullptr}.run(exec);
  return ok();
}

ab_status ab_combine_backward(const ab_combine_backward_args* args, const ab_exec* exec) {
  AB_RETURN_IF_ERROR(check_struct("ab_combine_backward_args", args, args == nullptr ? 0 : args->size, sizeof(*args)));
  AB_RETURN_IF_ERROR(check_tensor("d_out", args->d_out, kFloats, {{"T"}, {"D"}}));
  const int64_t D = args->d_out->shape[1];
  Maps maps;
  AB_RETURN_IF_ERROR(check_maps(args->row_of_slot, args->slot_of_row, args->d_out->shape[0], &maps));
  AB_RETURN_IF_ERROR(check_optional("rows", args->rows, kFloats, {{"R", maps.R}, {"D", D}}));
  AB_RETURN_IF_ERROR(check_optional("weights", args->weights, kFloats, {{"T", maps.T}, {"K", maps.K}}));
  AB_RETURN_IF_ERROR(check_optional("d_rows", args->d_rows, kFloats, {{"R", maps.R}, {"D", D}}));
  AB_RETURN_IF_ERROR(check_optional("d_weights", args->d_weights, kFloats, {{"T", maps.T}, {"K", maps.K}}));
  if (args->d_weights != nullptr && args->rows == nullptr) {
    return AB_INVALID("rows: got NULL, expected the rows that were combined, for d_weights");
  }
  Spread{maps, Rows(args->d_out), args->weights, Rows(args->d_rows), Rows(args->rows), args->d_weights}.run(exec);
  return ok();
}

}  // extern "C"
