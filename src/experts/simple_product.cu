// A block of 16 x 16 threads computes tiles of 64 x 64 results, a thread 4 x 4 of them, from blocks of 16 terms in
// shared memory:
//
//   a [kTerms][kSide + kPad] float    of the tile's rows
//   b [kTerms][kSide + kPad] float    of the tile's columns
#include "experts/simple_product.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/dtype.h"
#include "core/status.h"
#include "experts/hopper/group_term_tiles.cuh"
#include "experts/hopper/row_tiles.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kSide = 64;
constexpr int kTerms = 16;
constexpr int kPad = 4;
constexpr int kEach = 4;
constexpr int kThreads = kSide / kEach * (kSide / kEach);
constexpr int kBlocks = 4;  // of a multiprocessor

__device__ float load(const Strided& m, int64_t matrix, int64_t row, int64_t column) {
  const int64_t at = matrix * m.matrix + row * m.row_step + column * m.column_step;
  return with_float_type(m.dtype, [&]<class T>(T) { return to_float(static_cast<const T*>(m.data)[at]); });
}

__device__ void store(const Strided& m, int64_t matrix, int64_t row, int64_t column, float value) {
  const int64_t at = matrix * m.matrix + row * m.row_step + column * m.column_step;
  with_float_type(m.dtype, [&]<class T>(T) { static_cast<T*>(m.data)[at] = from_float<T>(value); });
}

using Terms = float[kTerms][kSide + kPad];

// Terms begin ... of `side`, rows or columns, zeros outside. element(i, k): term k of row or column i.
template <class Element>
__device__ void fill(Terms& terms, bool terms_are_neighbours, int sides, int begin, int end, const Element& element) {
  for (int at = static_cast<int>(threadIdx.x); at < kSide * kTerms; at += kThreads) {
    const int side = terms_are_neighbours ? at / kTerms : at % kSide;
    const int term = terms_are_neighbours ? at % kTerms : at / kSide;
    terms[term][side] = side < sides && begin + term < end ? element(side, begin + term) : 0.0f;
  }
}

// terms [tile.term, tile.end_term) of the tile's sums.
__device__ void compute_tile(const SimpleProduct& p, const Tile& tile, Terms& a, Terms& b) {
  const int rows = min(tile.end_row - tile.row, kSide);
  const int columns = min(static_cast<int>(p.columns) - tile.column, kSide);
  const int first_row = static_cast<int>(threadIdx.x) / (kSide / kEach) * kEach;
  const int first_column = static_cast<int>(threadIdx.x) % (kSide / kEach) * kEach;
  float sums[kEach][kEach] = {};
  for (int begin = tile.term; begin < tile.end_term; begin += kTerms) {
    __syncthreads();
    fill(a, p.a.column_step == 1, rows, begin, tile.end_term,
         [&](int i, int k) { return load(p.a, tile.expert, tile.row + i, k); });
    fill(b, p.b.row_step == 1, columns, begin, tile.end_term,
         [&](int i, int k) { return load(p.b, tile.expert, k, tile.column + i); });
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTerms; ++k) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[i][j] = fmaf(a[k][first_row + i], b[k][first_column + j], sums[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (first_row + i >= rows || first_column + j >= columns) continue;
      store(p.out, tile.expert, tile.row + first_row + i, tile.column + first_column + j, sums[i][j]);
    }
  }
}

template <class Tiles, class Groups>
__global__ void __launch_bounds__(kThreads) simple_product(const SimpleProduct p, const Groups groups) {
  __shared__ Terms a;
  __shared__ Terms b;
  __shared__ Tile tile;
  wait_for_previous_kernel();
  Tiles tiles(groups);
  for (;;) {
    __syncthreads();
    if (warp_index() == 0) {
      const Tile next = tiles.next();
      if (lane_index() == 0) tile = next;
    }
    __syncthreads();
    if (tile.expert == kNoTile) break;
    compute_tile(p, tile, a, b);
  }
  let_next_kernel_start();
}

int64_t tiles_of(int64_t size) { return (size + kSide - 1) / kSide; }

template <class Tiles, class Groups>
ab_status launch_simply(const SimpleProduct& p, const Groups& groups, int64_t tiles, int multiprocessors,
                        cudaStream_t stream) {
  return launch("simple product", simple_product<Tiles, Groups>,
                {std::min<int64_t>(tiles, int64_t{kBlocks} * multiprocessors), kThreads, 0, stream, true}, p, groups);
}

// What the kernels count in int32.
ab_status check_counts(const SimpleProduct& p, int64_t tiles) {
  const int64_t most = INT32_MAX - kSide - int64_t{kBlocks} * (1 << 16);
  if (tiles <= most && p.R <= most && p.rows <= most && p.columns <= most && p.terms <= most) return ok();
  return error(AB_UNSUPPORTED, "grouped product: got %lld tiles of 64 x 64, expected less than 2^31 on CUDA",
               static_cast<long long>(tiles));
}

}  // namespace

ab_status multiply_rows_simply(const SimpleProduct& p, int multiprocessors, cudaStream_t stream) {
  const int64_t tiles = most_row_tiles(p.R, p.E, kSide) * tiles_of(p.columns);
  AB_RETURN_IF_ERROR(check_counts(p, tiles));
  const RowGroups groups{p.group_sizes, static_cast<int32_t>(p.E), static_cast<int32_t>(p.R),
                         static_cast<int32_t>(p.terms), static_cast<int32_t>(tiles_of(p.columns))};
  return launch_simply<RowTiles<kSide, kSide>>(p, groups, tiles, multiprocessors, stream);
}

ab_status multiply_terms_simply(const SimpleProduct& p, int multiprocessors, cudaStream_t stream) {
  const int64_t tiles = p.E * tiles_of(p.rows) * tiles_of(p.columns);
  AB_RETURN_IF_ERROR(check_counts(p, tiles));
  const GroupTerms groups{p.group_sizes,
                          static_cast<int32_t>(p.E),
                          static_cast<int32_t>(p.R),
                          static_cast<int32_t>(p.rows),
                          static_cast<int32_t>(tiles_of(p.rows)),
                          static_cast<int32_t>(tiles_of(p.columns))};
  return launch_simply<GroupTermTiles<kSide, kSide>>(p, groups, tiles, multiprocessors, stream);
}

}  // namespace anabranch::cuda
