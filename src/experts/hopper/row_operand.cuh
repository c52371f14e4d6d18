// Operand A of a GEMM over rows: rows in expert order, or gathered rows.
#pragma once

#include "core/cuda/tensor_map.h"
#include "core/floats.h"
#include "core/status.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/hopper/limits.h"
#include "experts/hopper/operands.cuh"

namespace anabranch::cuda::hopper {

static_assert(kMaxGatherChunks == GatherSource::kOutOfBounds, "chunk indices fit uint32 beside kOutOfBounds");

// Describes the rows that `map` selects from a matrix with `columns` 16-bit columns.
inline GatherSource gather_source(const Floats& matrix, const RowMap& map, int64_t columns) {
  GatherSource from;
  from.source = static_cast<const char*>(matrix.data);
  from.slots = map.slots;
  from.slots_per_row = map.by_topk;
  from.source_rows = map.sources();
  from.row_chunks = static_cast<int32_t>(columns / 8);
  return from;
}

template <int kRows>
ab_status prepare_rows(const char* name, const Floats& matrix, const RowMap&, int64_t columns, RowOperand* operand) {
  AB_RETURN_IF_ERROR(make_row_window_map(name, matrix.data, matrix.dtype, columns, kPanel, kRows, &operand->map));
  return make_row_window_map(name, matrix.data, matrix.dtype, columns, kPanel, RowOperand::kFewRows,
                             &operand->few_rows_map);
}
template <int kRows>
ab_status prepare_rows(const char*, const Floats& matrix, const RowMap& map, int64_t columns,
                       GatheredRowOperand* operand) {
  static_cast<GatherSource&>(*operand) = gather_source(matrix, map, columns);
  return ok();
}

}  // namespace anabranch::cuda::hopper
