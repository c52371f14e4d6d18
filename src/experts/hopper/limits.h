// Limits of the kernels on sizes and addresses. Host code: kernels check nothing.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "core/cuda/tensor_map.h"
#include "experts/cuda/ops/counts.h"
#include "experts/cuda/ops/low_rank.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/cuda/ops/tiles/groups.h"
#include "experts/hopper/gate_up_layout.h"
#include "experts/hopper/tile_choice.h"

namespace anabranch::cuda::hopper {

static_assert(kMaxCount <= kMaxWindowRows, "row windows must cover all row indices of the kernels");

constexpr int64_t kTileRows = 128;                // minimum over the tile shapes of plain weights
constexpr int64_t kMinTileColumns = 128;          // minimum over the tile shapes for many columns
constexpr int64_t kMinThinTileColumns = 64;       // of the tile shape for few columns
constexpr int64_t kFp8TileColumns = 256;          // of the one shape for FP8
constexpr int64_t kMaxGatherChunks = 0xffffffff;  // 16-byte chunks of a gathered matrix
constexpr int32_t kPairDtype = AB_BFLOAT16;       // tensor maps of e4m3 count pairs of elements, which have its size

inline bool is_16_bit(int32_t dtype) { return dtype == AB_BFLOAT16 || dtype == AB_FLOAT16; }

inline bool sizes_fit(std::initializer_list<int64_t> sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size > 0 && size <= kMaxCount; });
}

inline bool tile_count_fits(int64_t R, int64_t E, int64_t columns, int64_t tile_columns) {
  return max_group_row_tiles(R, E, kTileRows) * ceil_div(columns, tile_columns) <= kMaxCount;
}

// Whether rows of 16-bit elements can be gathered.
inline bool fits_gather(const RowMap& map, int64_t columns) {
  return map.sources() <= kMaxGatherChunks / std::max<int64_t>(columns / 8, 1);
}

constexpr const char* kNot16Bit = "the dtype is not 16-bit";
constexpr const char* kNotCounted = "a size is 0, or there are 2^30 or more rows, columns or tiles";
constexpr const char* kNotChunks = "rows are not aligned or not whole 16-byte chunks";
constexpr const char* kNotRank = "an adapter's rows or factors are not aligned, or its rank is not a multiple of 8";
constexpr const char* kNotGathered = "the gathered matrix has 2^32 or more 16-byte chunks";

// Returns whether a low-rank term has u and B in whole 16-byte chunks. columns: those of B, if it is not transposed.
inline bool fits_low_rank(const LowRank& term, int32_t dtype, bool transposed, int64_t columns) {
  return term.rank == 0 || (sizes_fit({term.rank}) && fits_tensor_map(term.u, dtype, term.rank) &&
                            fits_tensor_map(term.b, dtype, transposed ? term.rank : columns));
}

// Checks a GEMM with a fused epilogue, of a feed-forward network. rows: operand A with D columns. intermediates:
// tensors of F columns that the epilogue reads or writes, or null.
inline const char* fused_unsupported_reason(const FfnSizes& s, const RowMap& map, const Floats& rows,
                                            std::initializer_list<Floats> intermediates) {
  const auto fits = [&](const Floats& m) { return m.data == nullptr || fits_tensor_map(m.data, rows.dtype, s.F); };
  if (!is_16_bit(rows.dtype)) return kNot16Bit;
  // For gated experts, half of a tile's columns are the gate's.
  if (!sizes_fit({s.R, s.E, s.D, s.P * s.F}) || !tile_count_fits(s.R, s.E, s.F, kMinTileColumns / 2)) {
    return kNotCounted;
  }
  if (!fits_tensor_map(rows.data, rows.dtype, s.D) || !std::all_of(intermediates.begin(), intermediates.end(), fits)) {
    return kNotChunks;
  }
  return fits_gather(map, s.D) ? nullptr : kNotGathered;
}

template <class F>
ab_status with_gate_up_layout(const FfnSizes& s, const F& f) {
  switch (gate_up_layout_of(s)) {
    case GateUpLayout::ungated: return f.template operator()<GateUpLayout::ungated>();
    case GateUpLayout::gated: return f.template operator()<GateUpLayout::gated>();
    default: return f.template operator()<GateUpLayout::interleaved>();
  }
}

}  // namespace anabranch::cuda::hopper
