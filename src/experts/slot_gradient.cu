#include "experts/slot_gradient.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "experts/hopper/row_tiles.cuh"
#include "experts/simple_product.h"

namespace anabranch::cuda {
namespace {

constexpr int kBlocks = 32;     // of one warp, of a multiprocessor
constexpr int kClearing = 256;  // threads

__global__ void __launch_bounds__(kClearing) clear_slots(float* const d_weights, const int64_t slots) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kClearing + threadIdx.x; i < slots;
       i += static_cast<int64_t>(gridDim.x) * kClearing) {
    d_weights[i] = 0.0f;
  }
}

// A warp takes 32 rows of an expert: a lane adds the parts of one, then all lanes together multiply row by row.
__global__ void __launch_bounds__(kWarp) sum_dots(const SlotGradient g, const RowGroups groups) {
  wait_for_previous_kernel();
  RowTiles<kWarp, 1> tiles(groups);
  int n = 0;
  for (Tile tile = tiles.next(n); tile.expert != kNoTile; tile = tiles.next(++n)) {
    const int rows = min(tile.end_row - tile.row, kWarp);
    const int32_t row = tile.row + lane_index();
    const bool is_row = lane_index() < rows;
    const int32_t slot = is_row ? g.map.slot_of(row) : -1;
    float sum = 0.0f;
    if (tile.expert != kNoExpert && slot >= 0) {
      for (int64_t part = 0; part < g.parts; ++part) sum += g.dots[part * g.s.R + row];
    }
    if (tile.expert != kNoExpert && g.b_out.data != nullptr) {
      for (int i = 0; i < rows; ++i) {
        const int32_t other = __shfl_sync(kAllLanes, slot, i);
        if (other < 0) continue;
        const int64_t d_y = g.map.source_of(other) * g.s.D;
        const int64_t bias = tile.expert * g.s.D;
        float product = 0.0f;
#pragma unroll 4
        for (int64_t d = lane_index(); d < g.s.D; d += kWarp)
          product = fmaf(g.d_y[d_y + d], g.b_out[bias + d], product);
        product = sum_lanes<kWarp>(product);
        if (lane_index() == i) sum += product;
      }
    }
    // Slots past the groups have been cleared; rows that are slots themselves are all written here.
    if (slot >= 0 && (tile.expert != kNoExpert || g.map.slots == nullptr)) g.d_weights[slot] = sum;
  }
  let_next_kernel_start();
}

}  // namespace

ab_status compute_slot_gradient(const SlotGradient& g, int multiprocessors, cudaStream_t stream) {
  if (g.map.slots != nullptr) {
    const int64_t blocks = (g.s.slots() + kClearing - 1) / kClearing;
    AB_RETURN_IF_ERROR(launch("slot gradient: clear_slots", clear_slots,
                              {std::min(blocks, int64_t{8} * multiprocessors), kClearing, 0, stream, true}, g.d_weights,
                              g.s.slots()));
  }
  if (g.s.R == 0) return ok();
  const int64_t tiles = most_row_tiles(g.s.R, g.s.E, kWarp);
  AB_RETURN_IF_ERROR(check_counts({g.s.R, g.s.E}, tiles));
  const RowGroups groups{g.group_sizes, static_cast<int32_t>(g.s.E), static_cast<int32_t>(g.s.R), 0, 1};
  return launch("slot gradient", sum_dots,
                {std::min(tiles, int64_t{kBlocks} * multiprocessors), kWarp, 0, stream, true}, g, groups);
}

}  // namespace anabranch::cuda
