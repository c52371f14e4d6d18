#include "balance/statistics.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kMostWarps = 32;
constexpr int kColumns = 8;              // of a block: one sector of 32 bytes of a row
constexpr int kRows = kWarp / kColumns;  // that a warp reads at once

// Sums 8 columns of `blocks` rows: every thread its rows in turns, then the threads of a column in a fixed order.
template <class Total, class T>
__device__ void add_columns(const T* partial, int64_t blocks, int64_t E, int64_t column, Total* shared, T* out) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int lane_column = lane_index() % kColumns;
  const int row = warp_index() * kRows + lane_index() / kColumns;
  Total total = 0;
  if (column < E) {
#pragma unroll 4
    for (int64_t block = row; block < blocks; block += warps * kRows) {
      total += static_cast<Total>(partial[block * E + column]);
    }
  }
  shared[row * kColumns + lane_column] = total;
  __syncthreads();
  if (warp_index() == 0) {
    total = 0;
    for (int other = lane_index() / kColumns; other < warps * kRows; other += kRows) {
      total += shared[other * kColumns + lane_column];
    }
#pragma unroll
    for (int distance = kColumns; distance < kWarp; distance *= 2) {
      total += __shfl_xor_sync(kAllLanes, total, distance);
    }
    if (lane_index() < kColumns && column < E) out[column] = static_cast<T>(total);
  }
}

// Half of the blocks add counts, if both are wanted.
__global__ void __launch_bounds__(kMostWarps* kWarp)
    add_kernel(Partials partials, int64_t blocks, int64_t E, int64_t strips, int32_t* counts, float* sums) {
  __shared__ double shared[kMostWarps * kWarp];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const bool adds_counts = counts != nullptr && (sums == nullptr || blockIdx.x < gridDim.x / 2);
  const int64_t strip = blockIdx.x - (counts != nullptr && !adds_counts ? gridDim.x / 2 : 0);
  const int64_t sequence = strip / strips;
  const int64_t column = strip % strips * kColumns + lane_index() % kColumns;
  const int64_t first = sequence * blocks * E;
  if (adds_counts) {
    add_columns(partials.counts + first, blocks, E, column, reinterpret_cast<int32_t*>(shared), counts + sequence * E);
  } else {
    add_columns(partials.sums + first, blocks, E, column, shared, sums + sequence * E);
  }
}

}  // namespace

ab_status add_partials(const TokenTiles& tiles, int64_t E, const Partials& partials, int32_t* counts, float* sums,
                       cudaStream_t stream) {
  if (counts == nullptr && sums == nullptr) return ok();
  if (tiles.blocks_per_sequence == 1) return ok();
  const int64_t strips = (E + kColumns - 1) / kColumns;
  int warps = 1;
  while (warps < kMostWarps && warps * kRows * 2 <= tiles.blocks_per_sequence) warps *= 2;
  const int64_t kinds = counts != nullptr && sums != nullptr ? 2 : 1;
  return launch("statistics", add_kernel, {kinds * tiles.sequences * strips, warps * kWarp, 0, stream, true}, partials,
                tiles.blocks_per_sequence, E, strips, counts, sums);
}

}  // namespace anabranch::cuda
