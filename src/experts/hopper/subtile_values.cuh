// A subtile of accumulators as values that an epilogue may change.
#pragma once

#include "core/cuda/access.cuh"
#include "experts/hopper/row_weights.cuh"
#include "experts/hopper/subtile_writer.cuh"

namespace anabranch::cuda::hopper {

// Of one warp: lane i has columns of the subtile's rows i / 4 and i / 4 + 8, as wgmma leaves them.
template <class Out>
struct SubtileValues {
  static constexpr int kCount = kSubtileColumns<Out> / 2;
  float values[kCount];

  __device__ __forceinline__ explicit SubtileValues(const float* acc) { copy_accumulators(values, acc); }

  // Times the rows' weights.
  __device__ __forceinline__ void scale(const RowPair& rows) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] *= rows.weight[i / 2 % 2];
  }

  // Plus a bias from `bias` on, 4-byte aligned, `left` elements of it, times the rows' weights.
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

  // Becomes 0 in rows that are padding.
  __device__ __forceinline__ void clear_padding(const RowPair& rows) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!rows.real[i / 2 % 2]) values[i] = 0.0f;
    }
  }
};

}  // namespace anabranch::cuda::hopper
