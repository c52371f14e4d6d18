// One kernel sums up to 512 rows of an expert at a time. A second kernel adds these partial sums in row order, so the
// result does not depend on which CTA computes what.
//
// The partial sum of expert e that starts at row `begin` has index begin / 512 + e. The indices of one expert are
// consecutive. No two experts share an index, because begin / 512 never decreases from one expert to the next.
#include "experts/cuda/bias_gradient.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "experts/cuda/ops/counts.h"
#include "experts/cuda/ops/tiles/block_tiles.cuh"
#include "experts/cuda/ops/tiles/group_tile_scheduler.cuh"
#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"
#include "experts/cuda/ops/workspace_sizes.h"

namespace anabranch::cuda {
namespace {

constexpr int kRows = kBiasRows;  // per partial sum
constexpr int kWarps = 8;
constexpr int kBatch = 8;   // rows per warp that are loaded together
constexpr int kBlocks = 3;  // per SM

// Columns of a CTA. A lane holds kVectors vectors of kEach adjacent columns each.
template <class T, int kEach>
struct Columns {
  static constexpr int kVectors = kEach == 1 ? 4 : 1;
  static constexpr int kPerLane = kVectors * kEach;
  static constexpr int kCount = kPerLane * kWarp;
  static_assert(kCount <= kWarps * kWarp, "one thread adds up one column");

  // The first column of a lane's v-th vector.
  static __device__ int first_column(int v) { return (v * kWarp + lane_index()) * kEach; }
};

// The source rows of one partial sum, looked up before they are read.
struct SourceRows {
  int32_t row[kRows];   // row of the matrix; -1: padding, or past the tile
  float weight[kRows];  // undefined where row is -1

  // Called by all threads of the CTA.
  __device__ void find(const BiasGradient& g, const Tile& tile) {
    const int rows = min(tile.end_row - tile.row, kRows);
    for (int i = static_cast<int>(threadIdx.x); i < kRows; i += kWarps * kWarp) {
      const int32_t slot = i < rows ? g.map.slot_of(tile.row + i) : -1;
      row[i] = -1;
      if (slot < 0) continue;
      row[i] = g.gathers ? g.map.source_of(slot) : tile.row + i;
      weight[i] = g.weights[slot];
    }
  }
};

// Sums the rows of a tile. Consecutive rows go to consecutive warps.
template <class T, int kEach>
__device__ void add_rows(const BiasGradient& g, const Tile& tile, const SourceRows& from,
                         float (&sums)[Columns<T, kEach>::kPerLane]) {
  using Strip = Columns<T, kEach>;
  const int rows = min(tile.end_row - tile.row, kRows);
  const T* const m = static_cast<const T*>(g.m.data) + tile.column;
  static_assert(kRows % (kWarps * kBatch) == 0, "every warp has whole batches of rows");
#pragma unroll 1
  for (int first = warp_index(); first < rows; first += kWarps * kBatch) {
    Vector<T, kEach> values[kBatch][Strip::kVectors];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t row = from.row[first + i * kWarps];
      const T* const begin = m + static_cast<int64_t>(row) * g.N;
#pragma unroll
      for (int v = 0; v < Strip::kVectors; ++v) {
        values[i][v].load_if(row >= 0 && tile.column + Strip::first_column(v) < g.N, begin + Strip::first_column(v));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (from.row[first + i * kWarps] < 0) continue;
      const float weight = from.weight[first + i * kWarps];
#pragma unroll
      for (int j = 0; j < Strip::kPerLane; ++j) sums[j] = fmaf(weight, values[i][j / kEach][j % kEach], sums[j]);
    }
  }
}

template <class T, int kEach>
__global__ void __launch_bounds__(kWarps* kWarp, kBlocks)
    sum_rows(const BiasGradient g, const RowTiles tiles, float* const partial_sums) {
  using Strip = Columns<T, kEach>;
  __shared__ Tile tile;
  __shared__ SourceRows from;
  __shared__ float shared[kWarps][Strip::kCount];
  wait_for_previous_kernel();
  RowTileScheduler<kRows, Strip::kCount> scheduler(tiles);
  for (int n = 0; next_of_block(scheduler, n, tile); ++n) {
    if (tile.expert == kNoExpert) continue;
    from.find(g, tile);
    __syncthreads();
    float sums[Strip::kPerLane] = {};
    add_rows<T, kEach>(g, tile, from, sums);
#pragma unroll
    for (int j = 0; j < Strip::kPerLane; ++j)
      shared[warp_index()][Strip::first_column(j / kEach) + j % kEach] = sums[j];
    __syncthreads();
    const int column = static_cast<int>(threadIdx.x);
    if (column < Strip::kCount && tile.column + column < g.N) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp][column];
      partial_sums[(static_cast<int64_t>(tile.row / kRows) + tile.expert) * g.N + tile.column + column] = sum;
    }
  }
  let_next_kernel_start();
}

// One warp per CTA.
__global__ void __launch_bounds__(kWarp)
    add_sums(const BiasGradient g, const GroupTiles tiles, const float* const partial_sums) {
  wait_for_previous_kernel();
  GroupTileScheduler<1, kWarp> scheduler(tiles);
  int n = 0;
  for (Tile tile = scheduler.next(n); tile.expert != kNoTile; tile = scheduler.next(++n)) {
    const int64_t column = tile.column + lane_index();
    if (column < g.N) {
      const float* sums = partial_sums + (static_cast<int64_t>(tile.k / kRows) + tile.expert) * g.N + column;
      const int count = (tile.end_k - tile.k + kRows - 1) / kRows;
      float sum = 0.0f;
#pragma unroll 8
      for (int i = 0; i < count; ++i) sum += sums[i * g.N];
      g.d_bias.set(tile.expert * g.N + column, sum);
    }
    __syncwarp();
  }
  let_next_kernel_start();
}

}  // namespace

size_t workspace_of(const BiasGradient& g) { return bias_gradient_bytes(g.R, g.E, g.N); }

ab_status compute_bias_gradient(const BiasGradient& g, void* workspace, int multiprocessors, cudaStream_t stream) {
  if (g.E * g.N == 0) return ok();
  float* sums = static_cast<float*>(workspace);
  const int64_t narrow_columns = (g.N + kWarp - 1) / kWarp;
  const Groups groups = groups_of(g.group_sizes, g.E, g.R);
  const auto sum = [&]<class T, int kEach>() -> ab_status {
    const int64_t columns = (g.N + Columns<T, kEach>::kCount - 1) / Columns<T, kEach>::kCount;
    const int64_t count = max_group_row_tiles(g.R, g.E, kRows) * columns;
    AB_RETURN_IF_ERROR(check_counts({{"R", g.R},
                                     {"E", g.E},
                                     {"columns", g.N},
                                     {"tiles of a bias gradient", std::max(count, g.E * narrow_columns)}}));
    const Launch shape{std::min(count, int64_t{kBlocks} * multiprocessors), kWarps * kWarp, 0, stream, true};
    return launch("bias gradient", sum_rows<T, kEach>, shape, g, RowTiles{groups, 0, static_cast<int32_t>(columns)},
                  sums);
  };
  AB_RETURN_IF_ERROR(with_float_type(g.m.dtype, [&]<class T>(T) {
    constexpr int kEach = kAccessBytes / static_cast<int>(sizeof(T));
    const bool aligned = address(g.m.data) % kAccessBytes == 0 && g.N % kEach == 0;
    return aligned ? sum.template operator()<T, kEach>() : sum.template operator()<T, 1>();
  }));
  return launch("bias gradient: add_sums", add_sums,
                {std::min(g.E * narrow_columns, int64_t{kWarp} * multiprocessors), kWarp, 0, stream, true}, g,
                GroupTiles{groups, 1, 1, static_cast<int32_t>(narrow_columns)}, sums);
}

}  // namespace anabranch::cuda
