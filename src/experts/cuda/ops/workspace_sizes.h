// Workspace sizes of the experts' CUDA operations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/workspace.h"
#include "experts/block_scale.h"
#include "experts/column_chunks.h"

namespace anabranch::cuda {

// Bytes of rows [R, columns] of a dtype.
inline size_t rows_bytes(int64_t R, int64_t columns, int32_t dtype) {
  Workspace workspace;
  workspace.take_rows(R, columns, dtype);
  return workspace.size();
}

// Columns per chunk of rows [R, N] that are summed per token. Tiles have 256 columns for FP8 GEMMs, and on Hopper for
// long contractions with transposed weights (hopper/tile_choice.h).
inline int64_t combined_columns(int64_t R, int64_t E, int64_t N, int64_t D, bool backward, bool fp8) {
  constexpr int64_t kLongSums = 1536;
  const bool wide_tiles = fp8 || (backward && D >= kLongSums);
  return chunk_columns(R, E, N, D, backward, wide_tiles ? 256 : 192);
}

// The columns of a chunk in whole tiles of the kernels that decode packed weights; not more than `columns`.
inline int64_t whole_packed_tiles(int64_t columns) {
  constexpr int64_t kTileColumns = 256;
  return columns < kTileColumns ? columns : columns / kTileColumns * kTileColumns;
}

// Packed weights [E, N, C] are unpacked for as many experts at once as fit this memory, but at least for one.
#if !defined(ANABRANCH_UNPACKED_BYTES)
#define ANABRANCH_UNPACKED_BYTES (int64_t{512} << 20)
#endif
inline int64_t experts_at_once(int64_t E, int64_t N, int64_t C, int32_t dtype) {
  const double bytes = static_cast<double>(N) * static_cast<double>(C) * static_cast<double>(dtype_size(dtype));
  const double fitting = static_cast<double>(ANABRANCH_UNPACKED_BYTES) / std::max(bytes, 1.0);
  return static_cast<int64_t>(std::clamp(fitting, 1.0, static_cast<double>(std::max<int64_t>(E, 1))));
}
inline size_t unpacked_bytes(int64_t E, int64_t N, int64_t C, int32_t dtype) {
  return rows_bytes(E == 0 ? 0 : experts_at_once(E, N, C, dtype) * N, C, dtype);
}

// The rank of an adapter's operands of FP8 GEMMs: their rows of 16-bit elements must be whole 16-byte chunks.
constexpr int64_t padded_rank(int64_t rank) { return (rank + 7) / 8 * 8; }

// A thin GEMM of rows with `columns` columns that shares a kernel with a gradient (factor_pair.h) sums parts of its
// result [R, rank], one per kPairColumns columns.
constexpr int64_t kPairColumns = 256;
constexpr int64_t pair_parts(int64_t columns) { return (columns + kPairColumns - 1) / kPairColumns; }
constexpr size_t pair_bytes(int64_t R, int64_t columns, int64_t rank) {
  return static_cast<size_t>(pair_parts(columns) * R * rank) * sizeof(float);
}

// Whether there may be such a kernel: operands have 16 bits, the rank fits a panel of 64, and the parts take at most 64
// MiB. With fewer rows per expert than kMinRows, reading them once gains nothing.
constexpr bool may_pair(int64_t R, int64_t E, int64_t columns, int64_t rank, int32_t dtype) {
  constexpr int64_t kMaxRank = 64;
  constexpr int64_t kMaxColumns = int64_t{1} << 30;
  constexpr int64_t kMinRows = 64;
  return dtype != AB_FLOAT32 && rank <= kMaxRank && columns <= kMaxColumns && R / kMinRows >= E &&
         pair_bytes(R, columns, rank) <= size_t{64} << 20;
}

// Bytes of quantised rows and their scales.
inline size_t fp8_rows_bytes(int64_t R, int64_t columns) {
  Workspace workspace;
  workspace.take_rows(R, columns, AB_FLOAT8_E4M3);
  workspace.take_rows(R, columns / kScaleBlock, AB_FLOAT32);
  return workspace.size();
}

// Upper bound on the partial sums of <da', a>: every kernel sums over 128 columns or more.
constexpr int64_t max_dot_parts(int64_t F) { return (F + 127) / 128; }
constexpr size_t dots_bytes(int64_t R, int64_t F) { return static_cast<size_t>(max_dot_parts(F) * R) * sizeof(float); }

// Partial sums of a bias gradient: one per kBiasRows rows of an expert, and at most one shorter one per expert.
constexpr int kBiasRows = 512;
constexpr size_t bias_gradient_bytes(int64_t R, int64_t E, int64_t N) {
  return static_cast<size_t>(((R + kBiasRows - 1) / kBiasRows + E) * N) * sizeof(float);
}

// The sums of a weight gradient run over the rows of a group. Long groups are split into segments whose sums are
// computed separately and added afterwards. A segment is rows [begin, end) of an expert; empty for an expert without
// rows.
struct alignas(16) Segment {
  int32_t expert;
  int32_t begin;
  int32_t end;
  int32_t partial;  // index of its partial sum; kWhole: the segment is the whole group
};

// An expert with several segments. Its partial sums have indices first, ..., first + count - 1.
struct Split {
  int32_t expert;
  int32_t first;
  int32_t count;
};

constexpr int kSegmentUses = 4;  // weight gradients that one list of segments serves
struct SegmentCounts {
  int32_t segments;
  int32_t splits;
  int32_t next_tile[kSegmentUses];  // tiles taken from the queue of each gradient, beyond the first one per CTA
};

// Upper bounds from static shapes.
struct SegmentBounds {
  int64_t rows;      // per segment, a multiple of 64
  int64_t segments;  // at least one per expert
  int64_t partials;  // 0: no group can exceed one segment
};

// Bounds for gradients [E, D, N] of R rows in groups. A segment is about a quarter of the work of one SM, so that
// scheduling long segments first fills the SMs evenly. The partial sums take at most 132 MiB, whatever the shape.
inline SegmentBounds bound_segments(int64_t R, int64_t E, int64_t D, int64_t N) {
  constexpr double kMultiprocessors = 132;  // SMs; a constant, so that results do not depend on the device
  constexpr double kTile = 128 * 256;
  constexpr double kSegments = 4;      // per SM
  constexpr int64_t kMinRows = 512;    // rows; shorter segments cost more than they gain
  constexpr int64_t kThin = 64;        // rows or columns of a gradient that is bound by memory
  constexpr int64_t kManyGroups = 16;  // groups that keep the SMs evenly busy with such gradients without a split
  const auto whole_k_blocks = [](int64_t rows) { return (rows + 63) / 64 * 64; };
  const double share = static_cast<double>(D) * static_cast<double>(N) / (kTile * kMultiprocessors * kSegments);
  SegmentBounds bounds{};
  bounds.rows = whole_k_blocks(std::max<int64_t>(R, 1));
  if (share < 1 && (std::min(D, N) > kThin || E < kManyGroups)) {
    const auto rows = static_cast<int64_t>(static_cast<double>(R) * share) + 1;
    bounds.rows = std::min(bounds.rows, whole_k_blocks(std::max(rows, kMinRows)));
  }
  // A group of r > `rows` rows has at most r / rows + 1 segments, fewer than 2 r / rows.
  bounds.partials = bounds.rows < R ? 2 * R / bounds.rows : 0;
  bounds.segments = E + bounds.partials;
  return bounds;
}

// Workspace layout: the counts, then the other parts, each 256-byte aligned.
struct SegmentLayout {
  size_t segments;
  size_t splits;
  size_t partials;  // [partials, D, N], float32

  explicit SegmentLayout(const SegmentBounds& bounds) {
    const auto aligned = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
    segments = aligned(sizeof(SegmentCounts));
    splits = segments + aligned(static_cast<size_t>(bounds.segments) * sizeof(Segment));
    partials = splits + aligned(static_cast<size_t>(bounds.partials / 2) * sizeof(Split));
  }
};

constexpr size_t kTotalRowsBytes = 256;  // one int32, aligned like the segments after it

// Workspace bytes of a weight gradient [E, D, N], or [1, D, N] if all experts share it.
inline size_t weight_gradient_bytes(int64_t R, int64_t E, int64_t D, int64_t N, bool shared = false) {
  if (shared) return kTotalRowsBytes + weight_gradient_bytes(R, 1, D, N);
  if (E == 0 || D == 0 || N == 0) return 0;
  const SegmentBounds bounds = bound_segments(R, E, D, N);
  return SegmentLayout(bounds).partials +
         static_cast<size_t>(bounds.partials) * static_cast<size_t>(D * N) * sizeof(float);
}

}  // namespace anabranch::cuda
