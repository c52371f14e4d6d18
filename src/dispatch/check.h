// Calls of dispatch, combine, chunk sort and a row_id_map after their checks: everything that can be wrong with them.
// The plan has its own, plan.h.
#pragma once

#include "anabranch/dispatch.h"
#include "dispatch/elements.h"
#include "dispatch/maps.h"

namespace anabranch {

// Dispatch and the backward pass of combine: both copy every token to the rows of its slots, with or without a weight;
// the second also takes the product of the token with what stands in the row.
struct Spread {
  Maps maps;
  Rows x;           // [T, D]
  Floats weights;   // [T, K]
  Rows to;          // [R, D]: weights[t, k] * x[t]; no data: not wanted
  Rows other;       // [R, D], for products
  Floats products;  // [T, K]: <x[t], other[row]>; no data: not wanted

  // Whether rows are bytes that move as they are.
  bool copies() const { return weights.data == nullptr && to.dtype == x.dtype; }
};

ab_status check_dispatch(const ab_dispatch_args* args, Spread* spread);
ab_status check_combine_backward(const ab_combine_backward_args* args, Spread* spread);

// out[t] = sum over k of weights[t, k] * rows[row], plus addend[t].
struct GatherSum {
  Maps maps;  // without slot_of_row
  Rows rows;  // [R, D]
  Floats weights;
  Rows out;     // [T, D]
  Rows addend;  // [T, D]; no data: zeros
};

ab_status check_combine(const ab_combine_args* args, GatherSum* sum);

struct ChunkSort {
  bool inverse = false;
  int64_t R = 0;
  int64_t S = 0;
  Rows x;    // [R, D]
  Rows out;  // [R, D]
  const int32_t* sizes = nullptr;
  const int32_t* order = nullptr;
  int32_t* row_id_map = nullptr;  // or nullptr
};

ab_status check_sort_chunks(const ab_sort_chunks_args* args, ChunkSort* sort);

struct RowIdMap {
  const int32_t* ids = nullptr;      // [T, 2E+1]
  const int32_t* padding = nullptr;  // [E], or nullptr: zeros
  Maps maps;                         // a slot for every pair: K = E

  // The row of a token's entry, padding included; -1 where it names none.
  AB_INLINE int32_t row(int32_t id, int32_t expert) const {
    const int64_t row = int64_t{id} + (padding == nullptr ? 0 : padding[expert]);
    return id >= 0 && row >= 0 && row < maps.R ? static_cast<int32_t>(row) : -1;
  }
};

ab_status check_expand_row_id_map(const ab_expand_row_id_map_args* args, RowIdMap* map);

}  // namespace anabranch
