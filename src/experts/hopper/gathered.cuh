// Operand A of a product over rows: the rows themselves, or rows that stand elsewhere.
#pragma once

#include <algorithm>

#include "core/cuda/tensor_map.h"
#include "core/status.h"
#include "experts/hopper/operands.cuh"
#include "experts/hopper/row_source.h"

namespace anabranch::cuda {

// A matrix of rows of 16-bit elements that stand elsewhere.
inline RowsElsewhere rows_elsewhere(const RowSource& rows, int64_t columns) {
  RowsElsewhere elsewhere;
  elsewhere.source = static_cast<const char*>(rows.data);
  elsewhere.slots = rows.slots;
  elsewhere.slots_per_row = Divisor(static_cast<int32_t>(rows.slots_per_row));
  elsewhere.source_rows = static_cast<int32_t>(rows.source_rows);
  elsewhere.row_chunks = static_cast<int32_t>(columns / 8);
  return elsewhere;
}

template <int kRows>
ab_status prepare_rows(const char* name, const RowSource& rows, int32_t dtype, int64_t columns, Rows* operand) {
  return make_row_window_map(name, rows.data, dtype, columns, kPanel, kRows, &operand->map);
}
template <int kRows>
ab_status prepare_rows(const char*, const RowSource& rows, int32_t, int64_t columns, GatheredRows* operand) {
  static_cast<RowsElsewhere&>(*operand) = rows_elsewhere(rows, columns);
  return ok();
}

// What rows of 16-bit elements must be to be gathered, if they are.
inline bool fits_gather(const RowSource& rows, int64_t columns) {
  constexpr int64_t kMostIndices = int64_t{1} << 31;
  constexpr int64_t kMostChunks = int64_t{RowsElsewhere::kNowhere};
  return rows.slots == nullptr ||
         (rows.source_rows < kMostIndices && rows.slots_per_row >= 1 && rows.slots_per_row < kMostIndices &&
          rows.source_rows <= kMostChunks / std::max<int64_t>(columns / 8, 1));
}

inline bool fits_operand(const RowSource& rows, int32_t dtype, int64_t columns) {
  return fits_tensor_map(rows.data, dtype, columns) && fits_gather(rows, columns);
}

}  // namespace anabranch::cuda
