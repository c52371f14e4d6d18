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

__device__ void compute_tile(const SimpleProduct& p, const Tile& tile, Terms& a, Terms& b) {
  const int rows = min(tile.end_row - tile.row, kSide);
  const int columns = min(static_cast<int>(p.N) - tile.column, kSide);
  const int first_row = static_cast<int>(threadIdx.x) / (kSide / kEach) * kEach;
  const int first_column = static_cast<int>(threadIdx.x) % (kSide / kEach) * kEach;
  float sums[kEach][kEach] = {};
  const int end = tile.expert == kNoExpert ? 0 : tile.end_term;
  for (int begin = 0; begin < end; begin += kTerms) {
    __syncthreads();
    fill(a, p.x.column_step == 1, rows, begin, end, [&](int i, int k) { return load(p.x, 0, tile.row + i, k); });
    fill(b, p.w.row_step == 1, columns, begin, end,
         [&](int i, int k) { return load(p.w, tile.expert, k, tile.column + i); });
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
      store(p.y, 0, tile.row + first_row + i, tile.column + first_column + j, sums[i][j]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) simple_product(const SimpleProduct p) {
  __shared__ Terms a;
  __shared__ Terms b;
  __shared__ Tile tile;
  wait_for_previous_kernel();
  RowTiles<kSide, kSide> tiles({p.group_sizes, static_cast<int32_t>(p.E), static_cast<int32_t>(p.R),
                                static_cast<int32_t>(p.K), static_cast<int32_t>((p.N + kSide - 1) / kSide)});
  for (int n = static_cast<int>(blockIdx.x);; n += static_cast<int>(gridDim.x)) {
    __syncthreads();
    if (warp_index() == 0) {
      const Tile next = tiles.at(n);
      if (lane_index() == 0) tile = next;
    }
    __syncthreads();
    if (tile.expert == kNoTile) break;
    compute_tile(p, tile, a, b);
  }
  let_next_kernel_start();
}

}  // namespace

ab_status multiply_simply(const SimpleProduct& p, int multiprocessors, cudaStream_t stream) {
  const int64_t tiles = most_row_tiles(p.R, p.E, kSide) * ((p.N + kSide - 1) / kSide);
  if (tiles > INT32_MAX || p.R > INT32_MAX - kSide || p.K > INT32_MAX - kTerms || p.N > INT32_MAX - kSide) {
    return error(AB_UNSUPPORTED, "grouped product: got %lld tiles of 64 x 64, expected less than 2^31 on CUDA",
                 static_cast<long long>(tiles));
  }
  return launch("simple product", simple_product,
                {std::min<int64_t>(tiles, int64_t{kBlocks} * multiprocessors), kThreads, 0, stream, true}, p);
}

}  // namespace anabranch::cuda
