// A block of 16 x 16 threads computes tiles of 64 x 64 results, a thread 4 x 4 of them, from k-blocks of 16 in
// shared memory:
//
//   a          [kDepth][kSide + kPad] float   of the tile's rows
//   b [kParts] [kDepth][kSide + kPad] float   of the tile's columns
//
// What becomes of the results is an Epilogue:
//
//   kParts                    1, or 2: both parts of b's columns give a result each
//   (tile, results)           called by all threads of the block, with what each has computed
#pragma once

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/floats.h"
#include "core/status.h"
#include "experts/cuda/ops/tiles/block_tiles.cuh"
#include "experts/cuda/ops/tiles/group_tile_scheduler.cuh"
#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"
#include "experts/cuda/simple_product.h"

namespace anabranch::cuda::simple {

constexpr int kSide = 64;
constexpr int kDepth = 16;
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

using Block = float[kDepth][kSide + kPad];

__device__ inline float load(const Strided& m, const RowMap& map, int64_t matrix, int32_t row, int64_t column,
                             int part = 0) {
  int64_t source = row;
  if (m.gathered) {
    const int32_t slot = map.slot_of(row);
    if (slot < 0) return 0.0f;
    source = map.source_of(slot);
  }
  return Floats(m.data, m.dtype)[matrix * m.matrix + source * m.row_step + column * m.column_step + part * m.part_step];
}

// The k-block from `begin` on of so many rows or columns, `sides`, zeros outside. element(i, k): of row or column i.
template <class Element>
__device__ void fill(Block& block, bool k_is_contiguous, int sides, int begin, int end, const Element& element) {
  for (int at = static_cast<int>(threadIdx.x); at < kSide * kDepth; at += kThreads) {
    const int side = k_is_contiguous ? at / kDepth : at % kSide;
    const int k = k_is_contiguous ? at % kDepth : at / kSide;
    block[k][side] = side < sides && begin + k < end ? element(side, begin + k) : 0.0f;
  }
}

// The sums of a tile. kRowsAreK: the k dimension is rows of a and b, and a's columns are the rows of results.
template <bool kRowsAreK, int kParts>
__device__ void sum_tile(const SimpleProduct& p, const Tile& tile, Block& a, Block (&b)[kParts],
                         Results<kParts>* results) {
  const int rows = min(tile.end_row - tile.row, kSide);
  const int columns = min(static_cast<int>(p.columns) - tile.column, kSide);
  const int first_row = static_cast<int>(threadIdx.x) / kThreadsOfRow * kEach;
  const int first_column = static_cast<int>(threadIdx.x) % kThreadsOfRow * kEach;
  results->row = tile.row + first_row;
  results->column = tile.column + first_column;
  results->rows = min(max(rows - first_row, 0), kEach);
  results->columns = min(max(columns - first_column, 0), kEach);
  for (int begin = tile.k; begin < tile.end_k; begin += kDepth) {
    __syncthreads();
    fill(a, kRowsAreK ? p.a.row_step == 1 : p.a.column_step == 1, rows, begin, tile.end_k, [&](int i, int k) {
      return kRowsAreK ? load(p.a, p.map, tile.expert, k, tile.row + i)
                       : load(p.a, p.map, tile.expert, tile.row + i, k);
    });
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      fill(b[part], p.b.row_step == 1, columns, begin, tile.end_k,
           [&](int i, int k) { return load(p.b, p.map, tile.expert, k, tile.column + i, part); });
    }
    __syncthreads();
    // A sum of few products first: errors grow with the number of such sums, not with that of products.
    float sums[kParts][kEach][kEach] = {};
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
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

template <bool kRowsAreK, class Scheduler, class Tiles, class Epilogue>
__global__ void __launch_bounds__(kThreads, kResident)
    simple_product(const SimpleProduct p, const Tiles tiles, const Epilogue epilogue) {
  __shared__ Block a;
  __shared__ Block b[Epilogue::kParts];
  __shared__ Tile tile;
  wait_for_previous_kernel();
  Scheduler scheduler(tiles);
  for (int n = 0; next_of_block(scheduler, n, tile); ++n) {
    Results<Epilogue::kParts> results;
    sum_tile<kRowsAreK>(p, tile, a, b, &results);
    epilogue(tile, results);
  }
  let_next_kernel_start();
}

inline int64_t tiles_of(int64_t size) { return (size + kSide - 1) / kSide; }

template <bool kRowsAreK, class Scheduler, class Tiles, class Epilogue>
ab_status launch_product(const SimpleProduct& p, const Tiles& tiles, int64_t count, const Epilogue& epilogue,
                         int multiprocessors, cudaStream_t stream) {
  return launch("simple product", simple_product<kRowsAreK, Scheduler, Tiles, Epilogue>,
                {std::min<int64_t>(count, int64_t{kBlocks} * multiprocessors), kThreads, 0, stream, true}, p, tiles,
                epilogue);
}

// a[r] b[e] for the rows r of group e, zeros past the groups.
template <class Epilogue>
ab_status launch_rows_product(const SimpleProduct& p, const Epilogue& epilogue, int multiprocessors,
                              cudaStream_t stream) {
  const int64_t count = most_row_tiles(p.R, p.E, kSide) * tiles_of(p.columns);
  AB_RETURN_IF_ERROR(check_counts({p.R, p.E, p.columns, p.k}, count));
  const RowTiles tiles{groups_of(p.group_sizes, p.E, p.R), static_cast<int32_t>(p.k),
                       static_cast<int32_t>(tiles_of(p.columns))};
  return launch_product<false, RowTileScheduler<kSide, kSide>>(p, tiles, count, epilogue, multiprocessors, stream);
}

// The sums over the rows r of group e of a[r]^T b[r].
template <class Epilogue>
ab_status launch_weight_gradient(const SimpleProduct& p, const Epilogue& epilogue, int multiprocessors,
                                 cudaStream_t stream) {
  const int64_t count = p.E * tiles_of(p.rows) * tiles_of(p.columns);
  AB_RETURN_IF_ERROR(check_counts({p.R, p.E, p.rows, p.columns}, count));
  const GroupTiles tiles{groups_of(p.group_sizes, p.E, p.R), static_cast<int32_t>(p.rows),
                         static_cast<int32_t>(tiles_of(p.rows)), static_cast<int32_t>(tiles_of(p.columns))};
  return launch_product<true, GroupTileScheduler<kSide, kSide>>(p, tiles, count, epilogue, multiprocessors, stream);
}

}  // namespace anabranch::cuda::simple
