#include "experts/cuda/slot_gradient.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/cuda/vector.cuh"
#include "experts/cuda/ops/counts.h"
#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kBlocks = 32;    // per SM, in kernels with one warp per block
constexpr int kThreads = 256;  // per CTA, in kernels with one thread per assignment or row

Launch one_by_one(int64_t count, int multiprocessors, cudaStream_t stream) {
  return {std::min((count + kThreads - 1) / kThreads, int64_t{8} * multiprocessors), kThreads, 0, stream, true};
}

__global__ void __launch_bounds__(kThreads) clear_slots(float* const d_weights, const int64_t slots) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < slots;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    d_weights[i] = 0.0f;
  }
}

// Returns the number of rows in the groups, at most R. Negative sizes count as 0. Called by all threads of a CTA.
__device__ int64_t rows_of_groups(const int32_t* group_sizes, int64_t E, int64_t R) {
  __shared__ int64_t warp_rows[kThreads / kWarp];
  int64_t rows = 0;
  for (int64_t e = threadIdx.x; e < E; e += kThreads) rows += max(group_sizes[e], 0);
  rows = sum_lanes<kWarp>(rows);
  if (lane_index() == 0) warp_rows[warp_index()] = rows;
  __syncthreads();
  rows = 0;
  for (const int64_t count : warp_rows) rows += count;
  return min(rows, R);
}

// The kernel without a bias: one thread adds the partial sums of a row.
__global__ void __launch_bounds__(kThreads) add_dots(const SlotGradient g) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t end = rows_of_groups(g.group_sizes, g.s.E, g.s.R);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; row < g.s.R;
       row += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int32_t slot = g.map.slot_of(static_cast<int32_t>(row));
    const bool counts = row < end && slot >= 0;
    float sum = 0.0f;
    for (int64_t part = 0; counts && part < g.parts; ++part) sum += g.dots[part * g.s.R + row];
    // Assignments without a row have been cleared. Without gather indices, rows are assignments and all are written
    // here.
    if (counts || !g.map.by_slot) g.d_weights[slot] = sum;
  }
}

// A lane's share of <d_y, b_out>, from element offsets d_y and bias. kEach: elements per access.
template <class T, int kEach>
__device__ float product_of_lane(const SlotGradient& g, int64_t d_y, int64_t bias) {
  const T* const left = static_cast<const T*>(g.d_y.data) + d_y;
  const T* const right = static_cast<const T*>(g.b_out.data) + bias;
  float product = 0.0f;
#pragma unroll 4
  for (int64_t d = lane_index() * kEach; d < g.s.D; d += kWarp * kEach) {
    using Elements = Vector<T, kEach>;
    Elements a;
    Elements b;
    a.bytes = *reinterpret_cast<const typename Elements::Bytes*>(left + d);
    b.bytes = *reinterpret_cast<const typename Elements::Bytes*>(right + d);
#pragma unroll
    for (int i = 0; i < kEach; ++i) product = fmaf(a[i], b[i], product);
  }
  return product;
}

// The kernel with a bias: a warp takes 32 rows of an expert. Each lane adds the partial sums of one row, then all lanes
// compute the dot products with the bias, row by row.
template <class T, int kEach>
__global__ void __launch_bounds__(kWarp) add_dots_and_bias(const SlotGradient g, const RowTiles tiles) {
  wait_for_previous_kernel();
  RowTileScheduler<kWarp, 1> scheduler(tiles);
  int n = 0;
  for (Tile tile = scheduler.next(n); tile.expert != kNoTile; tile = scheduler.next(++n)) {
    const int rows = min(tile.end_row - tile.row, kWarp);
    const int32_t row = tile.row + lane_index();
    const bool is_row = lane_index() < rows;
    const int32_t slot = is_row ? g.map.slot_of(row) : -1;
    float sum = 0.0f;
    if (tile.expert != kNoExpert && slot >= 0) {
      for (int64_t part = 0; part < g.parts; ++part) sum += g.dots[part * g.s.R + row];
    }
    if (tile.expert != kNoExpert) {
      for (int i = 0; i < rows; ++i) {
        const int32_t other = __shfl_sync(kAllLanes, slot, i);
        if (other < 0) continue;
        const int64_t d_y = g.map.source_of(other) * g.s.D;
        const float product = sum_lanes<kWarp>(product_of_lane<T, kEach>(g, d_y, tile.expert * g.s.D));
        if (lane_index() == i) sum += product;
      }
    }
    if (slot >= 0 && (tile.expert != kNoExpert || !g.map.by_slot)) g.d_weights[slot] = sum;
  }
  let_next_kernel_start();
}

}  // namespace

ab_status compute_slot_gradient(const SlotGradient& g, int multiprocessors, cudaStream_t stream) {
  if (g.map.by_slot) {
    AB_RETURN_IF_ERROR(launch("slot gradient: clear_slots", clear_slots,
                              one_by_one(g.s.slots(), multiprocessors, stream), g.d_weights, g.s.slots()));
  }
  if (g.s.R == 0) return ok();
  if (g.b_out.data == nullptr) {
    return launch("slot gradient", add_dots, one_by_one(g.s.R, multiprocessors, stream), g);
  }
  const int64_t count = max_group_row_tiles(g.s.R, g.s.E, kWarp);
  AB_RETURN_IF_ERROR(check_counts({{"R", g.s.R}, {"E", g.s.E}}));
  const RowTiles tiles{groups_of(g.group_sizes, g.s.E, g.s.R), 0, 1};
  const auto run = [&](auto* kernel) {
    return launch("slot gradient with the bias", kernel,
                  {std::min(count, int64_t{kBlocks} * multiprocessors), kWarp, 0, stream, true}, g, tiles);
  };
  return with_float_type(g.d_y.dtype, [&]<class T>(T) {
    constexpr int kEach = kAccessBytes / static_cast<int>(sizeof(T));
    const int64_t row_bytes = g.s.D * static_cast<int64_t>(sizeof(T));
    const uintptr_t address_bits = address(g.d_y.data) | address(g.b_out.data) | static_cast<uintptr_t>(row_bytes);
    return address_bits % kAccessBytes == 0 ? run(add_dots_and_bias<T, kEach>) : run(add_dots_and_bias<T, 1>);
  });
}

}  // namespace anabranch::cuda
