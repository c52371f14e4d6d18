// Shared code of the kernels that copy tokens to rows.
#pragma once

#include "core/cuda/launch.h"
#include "dispatch/check.h"
#include "dispatch/columns.cuh"

namespace anabranch::cuda {

// The first blocks of a grid write zeros to rows that no slot owns; the others process tokens.
struct SpreadGrid {
  static constexpr int64_t kMaxClearing = 256;

  int64_t width = 0;     // elements per row
  int64_t parts = 1;     // warps per token
  int64_t clearing = 0;  // number of blocks

  static int64_t clearing_blocks(const Spread& spread) {
    if (spread.to.data == nullptr) return 0;
    constexpr int64_t kRows = PartsBlock::kThreads;
    return std::min((spread.maps.R + kRows - 1) / kRows, kMaxClearing);
  }
};

// Each warp processes 32 rows at a time. To and N are those of the kernel's other writes.
template <class To, int N>
__device__ __forceinline__ void clear_rows(const Spread& spread, const SpreadGrid& grid) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  for (int64_t first = (static_cast<int64_t>(blockIdx.x) * warps + warp_index()) * kWarp; first < spread.maps.R;
       first += grid.clearing * warps * kWarp) {
    const int64_t row = first + lane_index();
    const bool empty = row < spread.maps.R && !spread.maps.is_filled(row);
    for (unsigned lanes = __ballot_sync(kAllLanes, empty); lanes != 0; lanes &= lanes - 1) {
      To* to = reinterpret_cast<To*>(spread.to.data) + (first + __ffs(static_cast<int>(lanes)) - 1) * grid.width;
      for (int64_t column = lane_index() * N; column < grid.width; column += kWarp * N) {
        Vector<To, N>{}.store_if(true, to + column);
      }
    }
  }
}

// to[row] = weights[slot] * x[t], zero in rows that no slot owns. Ignores spread.products.
ab_status launch_spread(const Spread& spread, cudaStream_t stream);

}  // namespace anabranch::cuda
