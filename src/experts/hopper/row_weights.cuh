// Row information for epilogues: which rows of a result are padding, and the weights of the others.
#pragma once

#include <cstdint>

#include "core/cuda/element.cuh"
#include "core/cuda/warp.cuh"
#include "core/floats.h"
#include "experts/cuda/ops/row_map.h"
#include "experts/cuda/ops/tiles/tile.cuh"

namespace anabranch::cuda::hopper {

struct RowWeights {
  const int32_t* slots;
  const void* weights;
  int32_t num_slots;
  int32_t dtype;

  RowWeights() = default;
  RowWeights(const RowMap& map, const Floats& slot_weights)
      : slots(map.slots), weights(slot_weights.data), num_slots(map.num_slots), dtype(slot_weights.dtype) {}
};

// Indices of the weights of a RowPair: assignments as stored in memory, or rows; -1 after the rows of the expert.
struct RowSlots {
  int32_t at[2];

  RowSlots() = default;
  // row: the first of the warp's rows in the tile.
  __device__ RowSlots(const RowWeights& from, const Tile& tile, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t r = tile.row + row + half * 8 + lane_index() / 4;
      at[half] = r < tile.end_row ? (from.slots == nullptr ? r : from.slots[r]) : -1;
    }
  }
};

// The two rows of a warp's 16 whose accumulators a lane holds: row lane / 4 of the first 8 and of the last 8.
struct RowPair {
  bool real[2];  // whether the row is neither padding nor after the rows of the expert
  float weight[2];

  RowPair() = default;
  __device__ RowPair(const RowWeights& from, const RowSlots& slots) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t at = slots.at[half];
      real[half] = at >= 0 && (from.slots == nullptr || at < from.num_slots);
      weight[half] = real[half] && from.weights != nullptr ? load_float(from.weights, from.dtype, at) : 1.0f;
    }
  }
  __device__ RowPair(const RowWeights& from, const Tile& tile, int row) : RowPair(from, RowSlots(from, tile, row)) {}

  // Called by the whole warp.
  __device__ bool all_real() const { return __all_sync(kAllLanes, real[0] && real[1]) != 0; }
};

}  // namespace anabranch::cuda::hopper
