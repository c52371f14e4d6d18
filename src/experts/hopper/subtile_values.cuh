// A subtile of accumulators as values that an epilogue can modify.
#pragma once

#include "core/cuda/access.cuh"
#include "experts/hopper/row_weights.cuh"
#include "experts/hopper/subtile_writer.cuh"

namespace anabranch::cuda::hopper {

// One warp's subtile: lane i holds columns of rows i / 4 and i / 4 + 8, in the wgmma layout.
template <class Out>
struct SubtileValues {
  static constexpr int kCount = kSubtileColumns<Out> / 2;
  float values[kCount];

  __device__ __forceinline__ explicit SubtileValues(const float* acc) { copy_accumulators(values, acc); }

  // Multiplies by the row weights.
  __device__ __forceinline__ void scale(const RowPair& rows) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] *= rows.weight[i / 2 % 2];
  }

  // Adds the bias times the row weights. `bias` is 4-byte aligned and has `left` elements.
  __device__ __forceinline__ void add_weighted(const Out* bias, int left, const RowPair& rows) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int column = i * 2 + lane_index() % 4 * 2;
      if (column >= left) return;
      const auto pair = *reinterpret_cast<const uint32_t*>(bias + column);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float value = j % 2 == 0 ? low_half<Out>(pair) : high_half<Out>(pair);
        values[i + j] = fmaf(rows.weight[j / 2], value, values[i + j]);
      }
    }
  }

  // Sets padding rows to 0.
  __device__ __forceinline__ void clear_padding(const RowPair& rows) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!rows.real[i / 2 % 2]) values[i] = 0.0f;
    }
  }
};

}  // namespace anabranch::cuda::hopper
