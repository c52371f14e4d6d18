// A block of 16 x 16 threads computes tiles of 64 x 64 results, a thread 4 x 4 of them, from blocks of 16 terms in
// shared memory:
//
//   a          [kTerms][kSide + kPad] float   of the tile's rows
//   b [kParts] [kTerms][kSide + kPad] float   of the tile's columns
//
// What becomes of the results is a Finish:
//
//   kParts                    1, or 2: the columns of b [terms, 2 * columns] give a result each, left and right
//   (tile, results)           called by all threads of the block, with what each has computed
#pragma once

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/floats.h"
#include "core/status.h"
#include "experts/block_tiles.cuh"
#include "experts/hopper/group_term_tiles.cuh"
#include "experts/hopper/row_tiles.cuh"
#include "experts/simple_product.h"

namespace anabranch::cuda::simple {

constexpr int kSide = 64;
constexpr int kTerms = 16;
constexpr int kPad = 4;
constexpr int kEach = 4;
constexpr int kThreadsOfRow = kSide / kEach;  // that have results of the same rows: neighbouring lanes
constexpr int kThreads = kThreadsOfRow * kThreadsOfRow;
constexpr int kBlocks = 4;    // of a multiprocessor
constexpr int kResident = 2;  // at least, of these at a time: 128 registers a thread

// Results of one thread, from (row, column) on; `rows` x `columns` of them are there.
template <int kParts>
struct Results {
  int32_t row = 0;
  int32_t column = 0;
  int32_t rows = 0;
  int32_t columns = 0;
  float sums[kParts][kEach][kEach] = {};
};

using Terms = float[kTerms][kSide + kPad];

__device__ inline float load(const Strided& m, const RowMap& map, int64_t matrix, int32_t row, int64_t column) {
  int64_t source = row;
  if (m.gathered) {
    const int32_t slot = map.slot_of(row);
    if (slot < 0) return 0.0f;
    source = map.source_of(slot);
  }
  return Floats(m.data, m.dtype)[matrix * m.matrix + source * m.row_step + column * m.column_step];
}

// Terms begin ... of `side`, rows or columns, zeros outside. element(i, k): term k of row or column i.
template <class Element>
__device__ void fill(Terms& terms, bool terms_are_neighbours, int sides, int begin, int end, const Element& element) {
  for (int at = static_cast<int>(threadIdx.x); at < kSide * kTerms; at += kThreads) {
    const int side = terms_are_neighbours ? at / kTerms : at % kSide;
    const int term = terms_are_neighbours ? at % kTerms : at / kSide;
    terms[term][side] = side < sides && begin + term < end ? element(side, begin + term) : 0.0f;
  }
}

// The sums of a tile. kOverTerms: terms are rows of a and b, and a's columns the rows of results.
template <bool kOverTerms, int kParts>
__device__ void sum_tile(const SimpleProduct& p, const Tile& tile, Terms& a, Terms (&b)[kParts],
                         Results<kParts>* results) {
  const int rows = min(tile.end_row - tile.row, kSide);
  const int columns = min(static_cast<int>(p.columns) - tile.column, kSide);
  const int first_row = static_cast<int>(threadIdx.x) / kThreadsOfRow * kEach;
  const int first_column = static_cast<int>(threadIdx.x) % kThreadsOfRow * kEach;
  results->row = tile.row + first_row;
  results->column = tile.column + first_column;
  results->rows = min(max(rows - first_row, 0), kEach);
  results->columns = min(max(columns - first_column, 0), kEach);
  for (int begin = tile.term; begin < tile.end_term; begin += kTerms) {
    __syncthreads();
    fill(a, kOverTerms ? p.a.row_step == 1 : p.a.column_step == 1, rows, begin, tile.end_term, [&](int i, int k) {
      return kOverTerms ? load(p.a, p.map, tile.expert, k, tile.row + i)
                        : load(p.a, p.map, tile.expert, tile.row + i, k);
    });
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      fill(b[part], p.b.row_step == 1, columns, begin, tile.end_term,
           [&](int i, int k) { return load(p.b, p.map, tile.expert, k, part * p.columns + tile.column + i); });
    }
    __syncthreads();
    // A sum of few terms first: errors grow with the number of such sums, not with the number of terms.
    float sums[kParts][kEach][kEach] = {};
#pragma unroll
    for (int k = 0; k < kTerms; ++k) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) {
            sums[part][i][j] = fmaf(a[k][first_row + i], b[part][k][first_column + j], sums[part][i][j]);
          }
        }
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) results->sums[part][i][j] += sums[part][i][j];
      }
    }
  }
}

template <bool kOverTerms, class Tiles, class Groups, class Finish>
__global__ void __launch_bounds__(kThreads, kResident)
    simple_product(const SimpleProduct p, const Groups groups, const Finish finish) {
  __shared__ Terms a;
  __shared__ Terms b[Finish::kParts];
  __shared__ Tile tile;
  wait_for_previous_kernel();
  Tiles tiles(groups);
  for (int n = 0; next_of_block(tiles, n, tile); ++n) {
    Results<Finish::kParts> results;
    sum_tile<kOverTerms>(p, tile, a, b, &results);
    finish(tile, results);
  }
  let_next_kernel_start();
}

inline int64_t tiles_of(int64_t size) { return (size + kSide - 1) / kSide; }

template <bool kOverTerms, class Tiles, class Groups, class Finish>
ab_status launch_product(const SimpleProduct& p, const Groups& groups, int64_t tiles, const Finish& finish,
                         int multiprocessors, cudaStream_t stream) {
  return launch("simple product", simple_product<kOverTerms, Tiles, Groups, Finish>,
                {std::min<int64_t>(tiles, int64_t{kBlocks} * multiprocessors), kThreads, 0, stream, true}, p, groups,
                finish);
}

// The sums of a[r] b[e] for the rows r of group e, of no terms past the groups.
template <class Finish>
ab_status multiply_rows(const SimpleProduct& p, const Finish& finish, int multiprocessors, cudaStream_t stream) {
  const int64_t tiles = most_row_tiles(p.R, p.E, kSide) * tiles_of(p.columns);
  AB_RETURN_IF_ERROR(check_counts({p.R, p.E, p.columns, p.terms}, tiles));
  const RowGroups groups{p.group_sizes, static_cast<int32_t>(p.E), static_cast<int32_t>(p.R),
                         static_cast<int32_t>(p.terms), static_cast<int32_t>(tiles_of(p.columns))};
  return launch_product<false, RowTiles<kSide, kSide>>(p, groups, tiles, finish, multiprocessors, stream);
}

// The sums over the rows r of group e of a[r]^T b[r].
template <class Finish>
ab_status multiply_terms(const SimpleProduct& p, const Finish& finish, int multiprocessors, cudaStream_t stream) {
  const int64_t tiles = p.E * tiles_of(p.rows) * tiles_of(p.columns);
  AB_RETURN_IF_ERROR(check_counts({p.R, p.E, p.rows, p.columns}, tiles));
  const GroupTerms groups{p.group_sizes,
                          static_cast<int32_t>(p.E),
                          static_cast<int32_t>(p.R),
                          static_cast<int32_t>(p.rows),
                          static_cast<int32_t>(tiles_of(p.rows)),
                          static_cast<int32_t>(tiles_of(p.columns))};
  return launch_product<true, GroupTermTiles<kSide, kSide>>(p, groups, tiles, finish, multiprocessors, stream);
}

}  // namespace anabranch::cuda::simple
