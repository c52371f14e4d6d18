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

#include <algorithm>
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
  int32_t team = 1;          // warps: a power of 2 that divides those of the CTA
  int32_t team_bits = 0;     // log2 of it
  int32_t rounds = 0;        // per range
  Divisor by_rounds;
  Divisor by_blocks;
  bool has_one_source = false;      // all rows of x are the same one, and all its k fit into shared memory
  int32_t depth = 0;                // k of a slab
  bool has_aligned_chunks = false;  // the low-rank term, for WarpSum
};

// A kernel whose ranges have 8 kRowGroups_ rows.
template <class Format, int kRowGroups_>
struct PackedShape {
  static constexpr int kRowGroups = kRowGroups_;
  static constexpr int kRows = 8 * kRowGroups;
  static constexpr int kWarps = 16;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kAhead = Chunk<Format>::kPieces == 1 ? 3 : 2;  // chunks of a warp on their way
};

constexpr int kMaxTeamBits = 3;

// The most shared memory of a CTA whose rows of x do not fit with all of k. The L1 cache gets the rest of the SM's
// memory. It holds the lines of weights that are being loaded.
constexpr int64_t kSlabBytes = 132 << 10;

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
// product.cuh. Called by all threads of the team. sums_up: whether there are sums; else the results are zeros. part: of
// the warp in the team, in any order.
template <int kRowGroups, class Epilogue>
__device__ __forceinline__ void write_results_of_team(const PackedProduct& p, const UnitRows& rows, int32_t column,
                                                      bool sums_up, int part, const float4* memory,
                                                      const Epilogue& epilogue) {
  const int unit_column = lane_index() % kColumns;
#pragma unroll 1
  for (int i = part * 4 + lane_index() / kColumns; i < 8 * kRowGroups; i += p.team * 4) {
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
  __device__ __forceinline__ void advance(int32_t rounds) {
    ++number;
    if (++in_range < rounds) return;
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
  // The first CTAs have one round more if the division has a rest.
  const auto block = static_cast<int32_t>(blockIdx.x);
  const int32_t per_block = p.by_blocks.quotient(rounds);
  const int32_t rest = rounds - per_block * static_cast<int32_t>(gridDim.x);
  const int32_t begin = block * per_block + min(block, rest);
  const int32_t end = begin + per_block + (block < rest ? 1 : 0);
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
  Round next(p, begin);  // whose chunks have not been loaded
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
  int32_t range = -1;  // whose slab is in shared memory
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
    // Each round another warp of the team has the first rows, since most ranges have few.
    write_results_of_team<kRowGroups>(p, rows, column, sums_up, (part + round.number) & (p.team - 1),
                                      sums + team * p.team * kRowGroups * kWarp, epilogue);
    round.advance(p.rounds);
    if (round.number < end) load_block_scales(round, 0);
  }
}

template <class Format, class Element, class Shape, bool kAligned, class Epilogue>
ab_status launch_packed_product(const char* name, PackedProduct p, const Epilogue& epilogue, cudaStream_t stream) {
  Device device;
  AB_RETURN_IF_ERROR(find_device(name, &device));
  p.has_padding = p.groups.R > p.map.num_slots && p.map.by_slot;
  p.slices = (p.columns.columns + p.columns.unit_columns() - 1) / p.columns.unit_columns();
  const int64_t ranges = max_ranges(p.groups.R, p.groups.E, Shape::kRows);
  const size_t others =
      sizeof(float4) * Shape::kThreads * Shape::kRowGroups + sizeof(UnitRows) * static_cast<size_t>(ranges);
  // The greatest k of a slab in a number of bytes of shared memory.
  const auto depth_in = [&](int64_t bytes) {
    return ((bytes - static_cast<int64_t>(kStaticBytes + others)) / Shape::kRows - slab_row_bytes(0)) / 2;
  };
  const int64_t k = (p.main.k + kChunkDepth - 1) / kChunkDepth * kChunkDepth;
  const bool fits = k <= depth_in(device.max_block_shared_bytes);
  const int64_t max_depth = depth_in(std::min<int64_t>(device.max_block_shared_bytes, kSlabBytes));
  // The team with the least time, in halves of a chunk, of the CTA with the most rounds, if all experts have rows. What
  // a round takes beside its chunks is an estimate.
  constexpr int64_t kOfRound = 3;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t used = std::min<int64_t>(p.groups.R, p.groups.E);
  int64_t least = INT64_MAX;
  for (int bits = 0; bits <= kMaxTeamBits; ++bits) {
    const int team = 1 << bits;
    if (!fits && Shape::kAhead * kChunkDepth * team > max_depth) break;
    const int64_t rounds = ceil_div(p.slices, Shape::kWarps / team);
    const int64_t chunks = ceil_div(p.main.k, kChunkDepth * team);
    const int64_t time = ceil_div(used * rounds, int64_t{device.multiprocessors}) * (2 * chunks + kOfRound);
    if (time >= least) continue;
    least = time;
    p.team = team;
    p.team_bits = bits;
    p.rounds = static_cast<int32_t>(rounds);
  }
  if (p.rounds == 0) return error(AB_UNSUPPORTED, "%s: the device has too little shared memory", name);
  // If k does not fit, a slab is a multiple of a group of chunks, so that no group belongs to two slabs.
  const int64_t step = Shape::kAhead * kChunkDepth * p.team;
  p.depth = static_cast<int32_t>(fits ? k : max_depth / step * step);
  p.has_one_source = p.main.gathers && p.map.sources() == 1 && fits;
  p.by_rounds = Divisor(p.rounds);
  const int64_t blocks = std::min<int64_t>(ranges * p.rounds, device.multiprocessors);
  p.by_blocks = Divisor(static_cast<int32_t>(blocks));
  const size_t shared = static_cast<size_t>(Shape::kRows) * slab_row_bytes(p.depth) + others;
  return launch(name, few_rows_packed_product<Format, Element, Shape, kAligned, Epilogue>,
                {blocks, Shape::kThreads, shared, stream, true}, p, epilogue);
}

// Whether data is 16-byte aligned.
inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

template <class Epilogue>
ab_status launch_packed_product(const char* name, int32_t dtype, const PackedProduct& p, const Epilogue& epilogue,
                                cudaStream_t stream) {
  const auto with_types = [&]<class Format, class Element>() {
    const auto launch = [&]<int kRowGroups, bool kAligned>() {
      return launch_packed_product<Format, Element, PackedShape<Format, kRowGroups>, kAligned>(name, p, epilogue,
                                                                                               stream);
    };
    if (!is_aligned(p.packed.values) || !is_aligned(p.main.x)) return launch.template operator()<1, false>();
    const int64_t rows = rows_of_range(p.groups.R, p.groups.E);
    return rows == 8    ? launch.template operator()<1, true>()
           : rows == 16 ? launch.template operator()<2, true>()
                        : launch.template operator()<4, true>();
  };
  const auto with_format = [&]<class Format>() {
    return dtype == AB_BFLOAT16 ? with_types.template operator()<Format, BFloat16>()
                                : with_types.template operator()<Format, Float16>();
  };
  return p.packed.dtype == AB_FLOAT4_E2M1X2 ? with_format.template operator()<Fp4Format>()
                                            : with_format.template operator()<Fp8Format>();
}

// The GEMM `plain` with packed weights. Its field main.w is not used. FP8: first_column and the number of columns are
// multiples of 16, so that the columns of a warp are in one block.
inline PackedProduct packed_product(const Product& plain, const PackedMatrices& packed, int64_t first_column) {
  PackedProduct p{plain, packed, static_cast<int32_t>(first_column)};
  p.has_aligned_chunks = is_aligned(p.low_rank.x) && is_aligned(p.low_rank.w) && p.low_rank.k % 8 == 0;
  return p;
}

}  // namespace anabranch::cuda::few_rows
