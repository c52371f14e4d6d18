// Tiles for whole blocks, where no queue hands them over (hopper/tile_queue.cuh): the first warp schedules, all wait.
#pragma once

#include "core/cuda/warp.cuh"
#include "experts/cuda/ops/tiles/tile.cuh"

namespace anabranch::cuda {

// The block's n-th tile, in shared memory; false: there are no more. By all threads of the block, which are done with
// the tile before.
template <class Scheduler>
__device__ __forceinline__ bool next_of_block(Scheduler& scheduler, int n, Tile& tile) {
  __syncthreads();
  if (warp_index() == 0) {
    const Tile next = scheduler.next(n);
    if (lane_index() == 0) tile = next;
  }
  __syncthreads();
  return tile.expert != kNoTile;
}

}  // namespace anabranch::cuda
