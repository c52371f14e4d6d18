// Small-M (decode) grouped GEMM with K-major weights. It is bound by weight bandwidth: each warp loads weights from
// device memory straight into the registers of mma.sync, once per 8 rows.
//
//   unit        8 rows of one expert x 16 stored columns: 8 columns each of gate and up, or 16 columns of the result
//   CTA         takes units in a grid-stride loop; its warps split k, and their sums are added in a fixed order
//   shared      [kWarps][kWarp] float4, the sums of the warps; then the list of row ranges, identical in every CTA
//
// Stored columns of the weights are the rows of MMA operand A (part 0 above part 1), rows of x are the columns of
// operand B. A lane reads 16-byte chunks of 8 consecutive k of either operand. Both operands therefore go through the
// instruction in the same permuted order of k.
#pragma once

#include <algorithm>

#include "core/cuda/access.cuh"
#include "core/cuda/block_sum.cuh"
#include "core/cuda/dynamic_memory.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/mma.cuh"
#include "experts/cuda/ops/low_rank.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/cuda/ops/tiles/groups.h"
#include "experts/cuda/ops/tiles/tile.cuh"

namespace anabranch::cuda::few_rows {

constexpr int kThreadsPerSm = 1024;  // resident threads; faster than fewer threads with more registers
constexpr int kRows = 8;             // per unit
constexpr int kColumns = 8;          // per unit and part
constexpr int kDepth = 32;           // k per step
constexpr int kAhead = 2;            // steps loaded at a time, to read whole cache lines

// The 16 stored columns of a unit: two runs of 8 columns.
struct StoredColumns {
  int32_t columns = 0;       // of the result
  bool in_parts = false;     // a column of the result has two stored columns; else a unit covers 16 columns of it
  bool alternating = false;  // the two stored columns are adjacent
  int32_t part_step = 0;     // if not alternating: the distance between them

  AB_INLINE int32_t unit_columns() const { return in_parts ? kColumns : 2 * kColumns; }
  // Returns the stored column of a column of the unit (part 0), and of its up column or the column kColumns further
  // (part 1). Returns 0 out of bounds.
  __device__ int64_t stored(int32_t column, int part) const {
    if (in_parts) return column >= columns ? 0 : alternating ? 2 * column + part : column + int64_t{part} * part_step;
    return column + part * kColumns >= columns ? 0 : column + part * kColumns;
  }
};

// Operands of a GEMM with contractions of length k.
struct Operands {
  const void* x = nullptr;  // rows of k elements
  bool gathers = false;     // x is indexed by the tokens of the assignments
  const void* w = nullptr;  // matrices of rows of k elements
  int64_t matrix = 0;       // elements from one expert's matrix to the next; 0: one matrix for all experts
  int32_t k = 0;
};

struct Product {
  Operands main;
  Operands low_rank;  // the term u B of an adapter, added to the same sums; k = 0: none
  RowMap map;
  Groups groups{};
  StoredColumns columns;
  bool skips_rest = false;
  int32_t slices = 0;        // units per range of rows; set when the GEMM is launched
  bool has_padding = false;  // groups contain padding rows; set when the GEMM is launched
};

// A range of rows of one expert, at most as many as a unit has.
struct UnitRows {
  int32_t expert;  // kNoExpert: rows after the groups
  int32_t begin;
  int32_t end;
};

// Every group, and the rows after the groups, may end with a range of fewer rows than a unit has.
constexpr int64_t max_ranges(int64_t R, int64_t E, int64_t unit_rows) { return R / unit_rows + std::min(R, E) + 1; }

// Static shared memory of list_rows(), for its sums, with the padding to the alignment of dynamic memory.
constexpr size_t kStaticBytes = 512;

// Lists the row ranges of all units of kUnitRows rows. Called by all threads of the CTA; returns the number of ranges.
template <int kUnitRows>
__device__ __forceinline__ int32_t list_rows(const Product& p, UnitRows* list) {
  const auto threads = static_cast<int32_t>(blockDim.x);
  const int32_t R = p.groups.R;
  const auto units_of = [](int64_t rows) { return (rows + kUnitRows - 1) / kUnitRows; };
  const auto is_listed = [&](int32_t group) { return group >= p.groups.first && group <= p.groups.last; };
  const int warps = min(threads, p.groups.E + kWarp - 1) / kWarp;  // that have groups
  int32_t end_of_all = 0;
  int32_t count = 0;
#pragma unroll 1
  for (int32_t first = 0; first < p.groups.E; first += threads) {
    const int32_t group = first + static_cast<int32_t>(threadIdx.x);
    const int64_t size = group < p.groups.E ? min(max(p.groups.sizes[group], 0), R) : 0;
    // Sum rows (low half) and units (high half) at once. Group sizes that exceed R need a second sum.
    int64_t total;
    const int64_t before = sum_before(size | (is_listed(group) ? units_of(size) : 0) << 32, &total, warps);
    const auto begin = static_cast<int32_t>(min(end_of_all + (before & 0xffffffff), int64_t{R}));
    const auto end = static_cast<int32_t>(min(begin + size, int64_t{R}));
    int32_t place = count + static_cast<int32_t>(before >> 32);
    auto units = static_cast<int32_t>(total >> 32);
    if (end_of_all + (total & 0xffffffff) > R) {
      place = count + sum_before(is_listed(group) ? static_cast<int32_t>(units_of(end - begin)) : 0, &units, warps);
    }
    end_of_all = static_cast<int32_t>(min(end_of_all + (total & 0xffffffff), int64_t{R}));
    count += units;
#pragma unroll 1
    for (int32_t i = 0; is_listed(group) && begin + i * kUnitRows < end; ++i) {
      list[place + i] = {group, begin + i * kUnitRows, min(begin + (i + 1) * kUnitRows, end)};
    }
  }
  if (!p.skips_rest && is_listed(p.groups.E)) {
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(threadIdx.x); end_of_all + i * kUnitRows < R; i += threads) {
      list[count + i] = {kNoExpert, end_of_all + i * kUnitRows, min(end_of_all + (i + 1) * kUnitRows, R)};
    }
    count += static_cast<int32_t>(units_of(R - end_of_all));
  }
  __syncthreads();
  return count;
}

// The partial sums of one warp over steps of k. Per step, a lane loads 8 consecutive k of one column of each part and
// of one row. Columns and rows out of bounds read another column or row, since their results are never stored; k out of
// bounds is zero.
template <class Element>
class WarpSum {
 public:
  __device__ __forceinline__ WarpSum(const Product& p, const Operands& of, const UnitRows& rows, int32_t column)
      : k_(of.k), lane_k_(8 * (lane_index() % 4)) {
    const int own = lane_index() / 4;
    const int32_t row = min(rows.begin + own, rows.end - 1);
    const int32_t source = of.gathers ? p.map.source_of(max(p.map.slot_of(row), 0)) : row;
    x_ = static_cast<const Element*>(of.x) + int64_t{source} * of.k;
    const auto* const matrix = static_cast<const Element*>(of.w) + rows.expert * of.matrix;
#pragma unroll
    for (int part = 0; part < 2; ++part) w_[part] = matrix + p.columns.stored(column + own, part) * of.k;
  }

  // Adds a part of the steps to the sums.
  __device__ __forceinline__ void run(int part, int parts, float (&sums)[4]) const {
    const int steps = (k_ + kDepth - 1) / kDepth;
    int step = steps * part / parts;
    const int end = steps * (part + 1) / parts;
#pragma unroll 1
    for (; step + kAhead <= min(end, k_ / kDepth); step += kAhead) add<true>(step, end, sums);
#pragma unroll 1
    for (; step < end; step += kAhead) add<false>(step, end, sums);
  }

 private:
  // kAll: all steps from `step` on are in bounds for all lanes.
  template <bool kAll>
  __device__ __forceinline__ void add(int step, int end, float (&sums)[4]) const {
    const auto k_of = [&](int i) { return (step + i) * kDepth + lane_k_; };
    const auto in_bounds = [&](int i) { return kAll || (step + i < end && k_of(i) < k_); };
    uint4 w[kAhead][2];
    uint4 x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        w[i][part] = load_streaming(reinterpret_cast<const uint4*>(w_[part] + (in_bounds(i) ? k_of(i) : 0)));
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) x[i] = *reinterpret_cast<const uint4*>(x_ + (in_bounds(i) ? k_of(i) : 0));
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      uint4(&a)[2] = w[i];
      if (!in_bounds(i)) a[0] = a[1] = x[i] = {};
      multiply_add_matrices<Element>(sums, {a[0].x, a[1].x, a[0].y, a[1].y}, x[i].x, x[i].y);
      multiply_add_matrices<Element>(sums, {a[0].z, a[1].z, a[0].w, a[1].w}, x[i].z, x[i].w);
    }
  }

  int32_t k_;
  int32_t lane_k_;
  const Element* x_;
  const Element* w_[2];
};

// Whether the range contains a row that is not padding. Called by a whole warp.
template <int kUnitRows>
__device__ __forceinline__ bool has_rows(const Product& p, const UnitRows& rows) {
  if (rows.expert == kNoExpert || !p.has_padding) return rows.expert != kNoExpert;
  const int32_t row = min(rows.begin + lane_index() % kUnitRows, rows.end - 1);
  return __ballot_sync(kAllLanes, p.map.slot_of(row) >= 0) != 0u;
}

// The result that a thread adds up: adjacent threads have adjacent columns. sums_up: has_rows() of the unit.
struct OwnResult {
  int column;  // in the unit
  int unit_row;
  int32_t row;
  bool writes;
  int32_t slot;  // -1: padding, or a row after the groups

  __device__ __forceinline__ OwnResult(const Product& p, const UnitRows& rows, bool sums_up)
      : column(static_cast<int>(threadIdx.x) % kColumns),
        unit_row(static_cast<int>(threadIdx.x) / kColumns),
        row(rows.begin + unit_row),
        writes(unit_row < kRows && row < rows.end),
        slot(writes && sums_up ? p.map.slot_of(row) : -1) {}
};

// Adds up the sums of the warps of a unit and calls the epilogue for every result with (expert, row, column, slot, sum
// of part 0, sum of part 1). Called by all threads of the CTA.
template <int kWarps, class Epilogue>
__device__ __forceinline__ void write_results(const Product& p, const UnitRows& rows, int32_t column,
                                              const OwnResult& own, bool sums_up, const float (&warp_sums)[4],
                                              float4 (*sums)[kWarp], const Epilogue& epilogue) {
  static_assert(kWarps * kWarp >= kRows * kColumns, "one thread adds up the sums of one result");
  if (sums_up) sums[warp_index()][lane_index()] = {warp_sums[0], warp_sums[1], warp_sums[2], warp_sums[3]};
  __syncthreads();
  if (own.writes) {
    float parts[2] = {};
    if (sums_up) {
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const auto* const lane_sums = reinterpret_cast<const float*>(&sums[warp][own.column * 4 + own.unit_row / 2]);
        parts[0] += lane_sums[own.unit_row % 2];
        parts[1] += lane_sums[2 + own.unit_row % 2];
      }
    }
#pragma unroll 1
    for (int part = 0; part < (p.columns.in_parts ? 1 : 2); ++part) {
      const int32_t result_column = column + part * kColumns + own.column;
      if (result_column >= p.columns.columns) break;
      epilogue(rows.expert, own.row, result_column, own.slot, part == 0 ? parts[0] : parts[1], parts[1]);
    }
  }
  __syncthreads();
}

template <class Element, int kWarps, class Epilogue>
__global__ void __launch_bounds__(kWarps* kWarp, kThreadsPerSm / (kWarps * kWarp))
    few_rows_product(const __grid_constant__ Product p, const __grid_constant__ Epilogue epilogue) {
  float4(*const sums)[kWarp] = &dynamic_shared_memory<float4[kWarp]>();
  auto* const list = reinterpret_cast<UnitRows*>(sums + kWarps);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int32_t units = list_rows<kRows>(p, list) * p.slices;

#pragma unroll 1
  for (auto unit = static_cast<int32_t>(blockIdx.x); unit < units; unit += static_cast<int32_t>(gridDim.x)) {
    const UnitRows rows = list[unit / p.slices];
    const int32_t column = unit % p.slices * p.columns.unit_columns();
    const bool sums_up = has_rows<kRows>(p, rows);
    const OwnResult own(p, rows, sums_up);
    float warp_sums[4] = {};
    if (sums_up) {
      WarpSum<Element>(p, p.main, rows, column).run(warp_index(), kWarps, warp_sums);
      if (p.low_rank.k > 0) WarpSum<Element>(p, p.low_rank, rows, column).run(warp_index(), kWarps, warp_sums);
    }
    write_results<kWarps>(p, rows, column, own, sums_up, warp_sums, sums, epilogue);
  }
}

// The low-rank term of a GEMM with `columns` stored columns.
inline Operands operands_of(const LowRank& term, int64_t columns) {
  if (term.rank == 0) return {};
  return {
      .x = term.u, .w = term.b, .matrix = term.shared ? 0 : term.rank * columns, .k = static_cast<int32_t>(term.rank)};
}

// Sets the fields that describe units of kUnitRows rows; returns the greatest number of row ranges.
template <int kUnitRows>
int64_t set_units(Product* p) {
  p->has_padding = p->groups.R > p->map.num_slots && p->map.by_slot;
  p->slices = (p->columns.columns + p->columns.unit_columns() - 1) / p->columns.unit_columns();
  return max_ranges(p->groups.R, p->groups.E, kUnitRows);
}

// Bytes of the sums of the warps and of the list of row ranges.
inline size_t shared_bytes(int threads, int64_t lists) {
  return sizeof(float4) * static_cast<size_t>(threads) + sizeof(UnitRows) * static_cast<size_t>(lists);
}

// Longer sums are split over more warps. The thresholds of k were measured.
constexpr int32_t kLongSum = 12 << 10;
constexpr int32_t kMediumSum = 7 << 9;

template <class Element, int kWarps, class Epilogue>
ab_status launch_product(const char* name, Product p, const Epilogue& epilogue, int multiprocessors,
                         cudaStream_t stream) {
  constexpr int kThreads = kWarps * kWarp;
  constexpr int kBlocks = kThreadsPerSm / kThreads;  // resident per SM
  const int64_t lists = set_units<kRows>(&p);
  const size_t shared = shared_bytes(kThreads, lists);
  return launch(
      name, few_rows_product<Element, kWarps, Epilogue>,
      {std::min(lists * p.slices, int64_t{kBlocks} * multiprocessors), kThreads, shared, stream, true, 1, kBlocks}, p,
      epilogue);
}

template <class Epilogue>
ab_status launch_product(const char* name, int32_t dtype, const Product& p, const Epilogue& epilogue,
                         int multiprocessors, cudaStream_t stream) {
  const auto with_element = [&]<class Element>() {
    const auto kernel = p.main.k >= kLongSum     ? launch_product<Element, 16, Epilogue>
                        : p.main.k >= kMediumSum ? launch_product<Element, 8, Epilogue>
                                                 : launch_product<Element, 4, Epilogue>;
    return kernel(name, p, epilogue, multiprocessors, stream);
  };
  return dtype == AB_BFLOAT16 ? with_element.template operator()<BFloat16>()
                              : with_element.template operator()<Float16>();
}

}  // namespace anabranch::cuda::few_rows
