// Queue of tiles in shared memory, from the scheduler warp to the producer and consumer warps.
#pragma once

#include "core/cuda/barrier.cuh"
#include "core/cuda/warp.cuh"
#include "experts/cuda/ops/tiles/tile.cuh"

namespace anabranch::cuda::hopper {

class TileQueue {
 public:
  // Each tile is read by `readers` warps. Called by one thread before any other use.
  __device__ void init(int readers) {
    for (int i = 0; i < kStages; ++i) {
      full_[i].init(1);
      empty_[i].init(static_cast<uint32_t>(readers));
    }
  }

  // Puts the n-th tile. Called by one whole warp.
  __device__ void put(int n, const Tile& tile) {
    const auto at = RingPosition<kStages>::nth(n);
    empty_[at.stage].wait(at.phase ^ 1u);
    __syncwarp();  // no lane may lag a phase behind
    if (lane_index() == 0) {
      tiles_[at.stage] = tile;
      full_[at.stage].arrive();
    }
    __syncwarp();
  }

  // Gets the n-th tile. Called by one whole warp; its first lane reads. A warp may skip tiles assigned to other warps.
  __device__ Tile get(int n) { return read(n, true); }

  // Reads a tile without releasing its entry; the warp must get() it later.
  __device__ Tile peek(int n) { return read(n, false); }

 private:
  static constexpr int kStages = 4;

  __device__ Tile read(int n, bool last) {
    const auto at = RingPosition<kStages>::nth(n);
    full_[at.stage].wait(at.phase);
    __syncwarp();  // no lane may lag a phase behind
    Tile tile{};
    if (lane_index() == 0) {
      tile = tiles_[at.stage];
      if (last) empty_[at.stage].arrive();
    }
    return broadcast_first_lane(tile);
  }

  static __device__ Tile broadcast_first_lane(const Tile& tile) {
    static_assert(sizeof(Tile) == 12 * sizeof(int32_t), "Tile must have the ten members that are copied below");
    const auto broadcast = [](int32_t value) { return __shfl_sync(kAllLanes, value, 0); };
    return {.expert = broadcast(tile.expert),
            .row = broadcast(tile.row),
            .end_row = broadcast(tile.end_row),
            .column = broadcast(tile.column),
            .k = broadcast(tile.k),
            .end_k = broadcast(tile.end_k),
            .k_blocks = broadcast(tile.k_blocks),
            .first_k_block = broadcast(tile.first_k_block),
            .partial = broadcast(tile.partial),
            .multicasts_b = broadcast(tile.multicasts_b)};
  }

  Tile tiles_[kStages];
  Barrier full_[kStages];
  Barrier empty_[kStages];
};

}  // namespace anabranch::cuda::hopper
