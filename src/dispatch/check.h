// Checked arguments of dispatch, combine, chunk sort and row_id_map. These functions make all checks of these calls;
// plan.h declares those of the plan.
#pragma once

#include "anabranch/dispatch.h"
#include "dispatch/elements.h"
#include "dispatch/maps.h"

namespace anabranch {

// Dispatch and the backward pass of combine: both copy each token to the rows of its slots, scaled by a weight if
// weights are given. The backward pass also computes the dot product of the token and the row.
struct Spread {
  Maps maps;
  Rows x;           // [T, D]
  Floats weights;   // [T, K]
  Rows to;          // [R, D]: weights[t, k] * x[t]; NULL data: not requested
  Rows other;       // [R, D], for the dot products
  Floats products;  // [T, K]: <x[t], other[row]>; NULL data: not requested

  // Whether rows are copied bytewise.
  bool copies() const { return weights.data == nullptr && to.dtype == x.dtype; }
};

ab_status check_dispatch(const ab_dispatch_args* args, Spread* spread);
ab_status check_combine_backward(const ab_combine_backward_args* args, Spread* spread);

// out[t] = sum over k of weights[t, k] * rows[row], plus addend[t].
struct GatherSum {
  Maps maps;  // slot_of_row is not set
  Rows rows;  // [R, D]
  Floats weights;
  Rows out;     // [T, D]
  Rows addend;  // [T, D]; NULL data: zeros
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
  Maps maps;                         // one slot per (token, expert) pair: K = E

  // The row of an entry, padding included; -1 if it names no row.
  AB_INLINE int32_t row(int32_t id, int32_t expert) const {
    const int64_t row = int64_t{id} + (padding == nullptr ? 0 : padding[expert]);
    return id >= 0 && row >= 0 && row < maps.R ? static_cast<int32_t>(row) : -1;
  }
};

ab_status check_expand_row_id_map(const ab_expand_row_id_map_args* args, RowIdMap* map);

}  // namespace anabranch
