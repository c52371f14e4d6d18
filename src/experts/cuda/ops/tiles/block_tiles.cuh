// Tile scheduling for whole CTAs, without a queue (as in hopper/tile_queue.cuh): the first warp schedules and the
// others wait.
#pragma once

#include "core/cuda/warp.cuh"
#include "experts/cuda/ops/tiles/tile.cuh"

namespace anabranch::cuda {

// Stores the CTA's n-th tile in shared memory; returns false if there are no more. Called by all threads of the CTA,
// after they have finished the previous tile.
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
