// Small-M grouped GEMM with packed weights, which are decoded in registers once per 8 to 32 rows.
//
//   range    up to 8 kRowGroups rows of one expert; its rows of x are in shared memory
//   team     1 to 8 warps with 16 stored columns. They divide k by chunks (packed_weights.cuh); their sums are added in
//            order
//   round    a range x the columns of all teams. Each CTA has a run of rounds, which are ordered by range
//   shared   a slab of x (row_slab.cuh); [kWarps][kRowGroups][kWarp] float4, the sums; the list of ranges
//
// Weights are operand A and rows of x operand B, as in product.cuh. Sums are added in another order than there.
#pragma once

#include <cstdint>

#include "core/cuda/divisor.h"
#include "core/cuda/named_barrier.cuh"
#include "experts/few_rows/packed_weights.cuh"
#include "experts/few_rows/product.cuh"
#include "experts/few_rows/row_slab.cuh"

namespace anabranch::cuda::few_rows {

// main.w is not used.
struct PackedProduct : Product {
  PackedMatrices packed;
  int32_t first_column = 0;  // of the stored columns
  // Set by launch_packed_product():
  int32_t team = 1;       // warps: a power of 2 that divides those of the CTA
  int32_t team_bits = 0;  // log2 of it
  int32_t rounds = 0;     // per range
  Divisor by_rounds;
  Divisor by_blocks;
  bool has_one_source = false;  // all rows of x are the same one, and all its k are in the slab
  int32_t depth = 0;            // k of a slab
  // Set by packed_product():
  bool has_aligned_chunks = false;  // the low-rank term, for WarpSum
};

constexpr int kMaxTeamBits = 3;

// A kernel whose ranges have 8 kRowGroups_ rows.
template <class Format, int kRowGroups_>
struct PackedShape {
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kRows = 8 * kRowGroups;
  static constexpr int kWarps = 16;
  static constexpr int kThreads = kWarps * kWarp;
  static_assert(kWarps / 2 <= 15 && kWarps % (1 << kMaxTeamBits) == 0, "each team of two or more has a named barrier");
  static constexpr int kAhead = Chunk<Format>::kPieces == 1 ? 3 : 2;  // chunks of a warp on their way
};

// Adds the low-rank term of any rank and alignment, in the order of WarpSum.
template <class Element>
__device__ __forceinline__ void add_unaligned_low_rank(const Product& p, const UnitRows& rows, int32_t column, int part,
                                                       int parts, float (&sums)[4]) {
  const Operands& of = p.low_rank;
  const int own = lane_index() / 4;
  const int32_t row = min(rows.begin + own, rows.end - 1);
  const auto* const x = static_cast<const Element*>(of.x) + int64_t{row} * of.k;
  const auto* const matrix = static_cast<const Element*>(of.w) + rows.expert * of.matrix;
  const Element* w[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) w[i] = matrix + p.columns.stored(column + own, i) * of.k;
  const int steps = (of.k + kDepth - 1) / kDepth;
#pragma unroll 1
  for (int step = steps * part / parts; step < steps * (part + 1) / parts; ++step) {
    const int k = step * kDepth + 8 * (lane_index() % 4);
    const int count = of.k - k;
    const uint4 a = load_elements(w[0] + k, count);
    const uint4 b = load_elements(w[1] + k, count);
    const uint4 c = load_elements(x + k, count);
    multiply_add_matrices<Element>(sums, {a.x, b.x, a.y, b.y}, c.x, c.y);
    multiply_add_matrices<Element>(sums, {a.z, b.z, a.w, b.w}, c.z, c.w);
  }
}

// Adds a chunk to the sums. x: the lane's elements of row group 0 in the first step.
template <class Format, class Element, int kRowGroups, bool kFast>
__device__ __forceinline__ void add_chunk(const Chunk<Format>& chunk, const char* x, int group_bytes,
                                          float (&sums)[kRowGroups][4]) {
  constexpr int kSteps = Format::kCodes / 8;  // of a piece
  const auto factors = Format::template factors_of<Element, kFast>(chunk.scales);
#pragma unroll
  for (int step = 0; step < kChunkDepth / 32; ++step) {
    const auto decode = [&](int part) {
      return Format::template decode<Element, kFast>(chunk.codes[part][step / kSteps], step % kSteps, factors, part);
    };
    const EightElements first = decode(0), second = decode(1);
    const uint32_t (&a)[4] = first.words;
    const uint32_t (&b)[4] = second.words;
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const uint4 rows = *reinterpret_cast<const uint4*>(x + group * group_bytes + step * 64);
      multiply_add_matrices<Element>(sums[group], {a[0], b[0], a[1], b[1]}, rows.x, rows.y);
      multiply_add_matrices<Element>(sums[group], {a[2], b[2], a[3], b[3]}, rows.z, rows.w);
    }
  }
}

// Adds the low-rank term to the lane's sums in shared memory, 8 rows at a time.
template <class Element>
__device__ __forceinline__ void add_low_rank(const PackedProduct& p, UnitRows rows, int32_t column, float4* sums) {
#pragma unroll 1
  for (; rows.begin < rows.end; rows.begin += 8, sums += kWarp) {
    float of_group[4] = {sums->x, sums->y, sums->z, sums->w};
    const int part = warp_index() & (p.team - 1);
    if (p.has_aligned_chunks) {
      WarpSum<Element>(p, p.low_rank, rows, column).run(part, p.team, of_group);
    } else {
      add_unaligned_low_rank<Element>(p, rows, column, part, p.team, of_group);
    }
    *sums = {of_group[0], of_group[1], of_group[2], of_group[3]};
  }
}

// Adds up the sums of a team's warps, which begin at `memory`, and calls the epilogue like write_results() in
// product.cuh. Called by all threads of the team. sums_up: whether there are sums; else the results are zeros. place: a
// different number for each warp of the team, 0 to p.team - 1; rows are divided between warps by it.
template <int kRowGroups, class Epilogue>
__device__ __forceinline__ void write_results_of_team(const PackedProduct& p, const UnitRows& rows, int32_t column,
                                                      bool sums_up, int place, const float4* memory,
                                                      const Epilogue& epilogue) {
  const int unit_column = lane_index() % kColumns;
#pragma unroll 1
  for (int i = place * 4 + lane_index() / kColumns; i < 8 * kRowGroups; i += p.team * 4) {
    const int32_t row = rows.begin + i;
    if (row >= rows.end) break;
    float parts[2] = {};
    int32_t slot = -1;
    if (sums_up) {
      slot = p.map.slot_of(row);
      const float4* from = memory + i / 8 * kWarp + unit_column * 4 + i % 8 / 2;
#pragma unroll 1
      for (int warp = 0; warp < p.team; ++warp, from += kRowGroups * kWarp) {
        const auto* const lane_sums = reinterpret_cast<const float*>(from) + i % 2;
        parts[0] += lane_sums[0];
        parts[1] += lane_sums[2];
      }
    }
#pragma unroll 1
    for (int part = 0; part < (p.columns.in_parts ? 1 : 2); ++part) {
      const int32_t result = column + unit_column + part * kColumns;
      if (result >= p.columns.columns) break;
      epilogue(rows.expert, row, result, slot, part == 0 ? parts[0] : parts[1], parts[1]);
    }
  }
}

// A round of a CTA.
struct Round {
  int32_t number;
  int32_t range;
  int32_t in_range;

  __device__ __forceinline__ Round(const PackedProduct& p, int32_t first)
      : number(first), range(p.by_rounds.quotient(first)), in_range(first - range * p.rounds) {}
  __device__ __forceinline__ void advance(int32_t rounds_of_range) {
    ++number;
    if (++in_range < rounds_of_range) return;
    in_range = 0;
    ++range;
  }
};

template <class Format, class Element, class Shape, bool kAligned, class Epilogue>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    few_rows_packed_product(const __grid_constant__ PackedProduct p, const __grid_constant__ Epilogue epilogue) {
  constexpr int kRowGroups = Shape::kRowGroups;
  const int row_bytes = slab_row_bytes(p.depth);
  char* const slab = dynamic_shared_array<char>();
  auto* const sums = reinterpret_cast<float4*>(slab + Shape::kRows * row_bytes);
  auto* const list = reinterpret_cast<UnitRows*>(sums + Shape::kWarps * kRowGroups * kWarp);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int32_t rounds = list_rows<Shape::kRows>(p, list) * p.rounds;
  const int32_t teams = Shape::kWarps >> p.team_bits;
  const int32_t team = warp_index() >> p.team_bits;
  const int part = warp_index() & (p.team - 1);
  // The first CTAs have one round more if the division has a remainder.
  const auto block = static_cast<int32_t>(blockIdx.x);
  const int32_t per_block = p.by_blocks.quotient(rounds);
  const int32_t remainder = rounds - per_block * static_cast<int32_t>(gridDim.x);
  const int32_t begin = block * per_block + min(block, remainder);
  const int32_t end = begin + per_block + (block < remainder ? 1 : 0);
  const auto column_of = [&](const Round& round) { return (round.in_range * teams + team) * p.columns.unit_columns(); };
  const auto lane_columns = [&](const Round& round) {
    const int32_t column = column_of(round) + lane_index() / 4;
    const auto stored = static_cast<int32_t>(p.columns.stored(column, 0));
    const auto part_step = static_cast<int32_t>(p.columns.stored(column, 1)) - stored;
    return LaneColumns{list[round.range].expert, p.first_column + stored, part_step};
  };

  float4* const of_lane = sums + warp_index() * kRowGroups * kWarp + lane_index();
  const int row_step = p.has_one_source ? 0 : row_bytes;
  const char* const x = slab + lane_index() / 4 * row_step + lane_index() % 4 * 16;
  const auto sync_team = [&] {
    if (p.team == 1) {
      __syncwarp();
    } else {
      sync_some_warps(1 + team, p.team);
    }
  };
  // Chunks are loaded in groups of kAhead, one group before they are needed, across rounds. In the last group of a
  // round some may not exist; these are not used. No branch is around the loads of a group: with one in each load,
  // warps waited for every chunk (ncu).
  const int group_depth = kChunkDepth * p.team * Shape::kAhead;
  const int groups_of_round = (p.main.k + group_depth - 1) / group_depth;
  Chunk<Format> chunks[Shape::kAhead];
  WeightLoader<Format, kAligned> loader;
  Round next(p, begin);  // the first round whose loads have not begun
  int groups_to_load = 0;
  const auto begin_group = [&] {
    if (groups_to_load-- > 0) return;
    // The next round in which the warp sums up.
    while (next.number < end &&
           (column_of(next) >= p.columns.columns || !has_rows<Shape::kRows>(p, list[next.range]))) {
      next.advance(p.rounds);
    }
    if (next.number < end) {
      loader.begin(p.packed, lane_columns(next), part);
      groups_to_load = groups_of_round - 1;
      next.advance(p.rounds);
    } else {
      loader.end();
      groups_to_load = INT32_MAX;
    }
  };
  BlockScales block_scales;
  const auto load_block_scales = [&](const Round& round, int first) {
    if constexpr (!Format::kScaledPieces) {
      if (const LaneColumns columns = lane_columns(round); columns.expert != kNoExpert) {
        block_scales.load(p.packed, columns, first);
      }
    }
  };
  Round round(p, begin);
  if (begin < end) load_block_scales(round, 0);
  begin_group();
#pragma unroll
  for (Chunk<Format>& chunk : chunks) loader.load(p.team, &chunk);
  int32_t range = -1;  // whose slab is in shared memory; with one source the first one
#pragma unroll 1
  while (round.number < end) {
    const UnitRows rows = list[round.range];
    const int32_t column = column_of(round);
    const bool sums_up = has_rows<Shape::kRows>(p, rows);
    const bool is_active = column < p.columns.columns;
    if (sums_up) {
      float acc[kRowGroups][4] = {};
      const auto add = [&](Chunk<Format>& chunk, int index, const char* at) {
        if constexpr (!Format::kScaledPieces) {
          if (!block_scales.has(index)) load_block_scales(round, index / kWarp * kWarp);
          chunk.scales = {block_scales.of(0, index), block_scales.of(1, index)};
        }
        if (Format::template allows_fast<Element>(chunk.scales)) {
          add_chunk<Format, Element, kRowGroups, true>(chunk, at, 8 * row_step, acc);
        } else {
          add_chunk<Format, Element, kRowGroups, false>(chunk, at, 8 * row_step, acc);
        }
      };
#pragma unroll 1
      for (int first = 0; first < p.main.k; first += p.depth) {
        if (p.depth < p.main.k || (range != round.range && (range < 0 || !p.has_one_source))) {
          const auto source_of = [&](int i) {
            if (p.has_one_source) return i == 0 ? 0 : -1;
            const int32_t row = rows.begin + i;
            if (row >= rows.end) return -1;
            return p.main.gathers ? p.map.source_of(max(p.map.slot_of(row), 0)) : row;
          };
          __syncthreads();
          load_slab<Format, Shape::kRows, Shape::kThreads, kAligned>(p.main, source_of, first, p.depth, slab);
          __syncthreads();
          range = round.range;
        }
        if (!is_active) continue;
        const int count = (min(p.depth, p.main.k - first) + kChunkDepth - 1) / kChunkDepth;
#pragma unroll 1
        for (int chunk = part; chunk - part < count;) {
          begin_group();
#pragma unroll
          for (int i = 0; i < Shape::kAhead; ++i) {
            if (chunk < count) add(chunks[i], first / kChunkDepth + chunk, x + chunk * kChunkDepth * 2);
            loader.load(p.team, &chunks[i]);
            chunk += p.team;
          }
        }
      }
      sync_team();  // the sums of the previous round have been read
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group) {
        of_lane[group * kWarp] = {acc[group][0], acc[group][1], acc[group][2], acc[group][3]};
      }
      if (is_active && p.low_rank.k > 0) add_low_rank<Element>(p, rows, column, of_lane);
      sync_team();
    }
    // Most ranges have few rows, so that one warp writes all results: each round another one.
    write_results_of_team<kRowGroups>(p, rows, column, sums_up, (part + round.number) & (p.team - 1),
                                      sums + team * p.team * kRowGroups * kWarp, epilogue);
    round.advance(p.rounds);
    if (round.number < end) load_block_scales(round, 0);
  }
}

}  // namespace anabranch::cuda::few_rows
