#include "balance/statistics.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kMaxWarps = 32;
constexpr int kColumns = 8;              // per block: one 32-byte sector of a row
constexpr int kRows = kWarp / kColumns;  // rows that a warp reads at once

// Sums 8 columns of `blocks` rows: each thread sums every n-th row; then the sums are reduced over the lanes of a
// column and over the warps.
template <class Total, class T>
__device__ void add_columns(const T* partial, unsigned blocks, unsigned E, unsigned column, Total* shared, T* out) {
  const auto warps = static_cast<unsigned>(blockDim.x) / kWarp;
  const auto lane = static_cast<unsigned>(lane_index());
  Total total = 0;
  const unsigned first = static_cast<unsigned>(warp_index()) * kRows + lane / kColumns;
  const T* element = partial + static_cast<int64_t>(first) * E + column;
  const int64_t step = static_cast<int64_t>(warps * kRows) * E;
  wait_for_previous_kernel();
  if (column < E) {
#pragma unroll 4
    for (unsigned row = first; row < blocks; row += warps * kRows, element += step)
      total += static_cast<Total>(*element);
  }
  const auto add_rows = [&] {
#pragma unroll
    for (int distance = kColumns; distance < kWarp; distance *= 2) {
      total += __shfl_xor_sync(kAllLanes, total, distance);
    }
  };
  add_rows();
  if (lane < kColumns) shared[warp_index() * kColumns + lane] = total;
  __syncthreads();
  if (warp_index() != 0) return;
  total = 0;
#pragma unroll
  for (unsigned turn = 0; turn < kMaxWarps / kRows; ++turn) {
    const unsigned warp = lane / kColumns + turn * kRows;
    if (warp < warps) total += shared[warp * kColumns + lane % kColumns];
  }
  add_rows();
  if (lane < kColumns && column < E) out[column] = static_cast<T>(total);
}

// If both counts and sums are requested, half of the blocks add counts. A block computes its position while the
// previous kernel still runs.
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    add_kernel(Partials partials, unsigned blocks, unsigned E, unsigned strips, int32_t* counts, float* sums) {
  __shared__ double shared[kMaxWarps * kColumns];
  let_next_kernel_start();
  const bool adds_counts = counts != nullptr && (sums == nullptr || blockIdx.x < gridDim.x / 2);
  const unsigned strip = blockIdx.x - (counts != nullptr && !adds_counts ? gridDim.x / 2 : 0);
  const unsigned sequence = strip / strips;
  const unsigned column = strip % strips * kColumns + static_cast<unsigned>(lane_index()) % kColumns;
  const int64_t first = static_cast<int64_t>(sequence) * blocks * E;
  const int64_t result = static_cast<int64_t>(sequence) * E;
  if (adds_counts) {
    add_columns(partials.counts + first, blocks, E, column, reinterpret_cast<int32_t*>(shared), counts + result);
  } else {
    add_columns(partials.sums + first, blocks, E, column, shared, sums + result);
  }
}

}  // namespace

ab_status add_block_statistics(const TokenTiles& tiles, int64_t E, const Partials& partials, int32_t* counts,
                               float* sums, cudaStream_t stream) {
  if (counts == nullptr && sums == nullptr) return ok();
  if (tiles.blocks_per_sequence == 1) return ok();
  const int64_t strips = (E + kColumns - 1) / kColumns;
  int warps = 1;
  while (warps < kMaxWarps && warps * kRows * 2 <= tiles.blocks_per_sequence) warps *= 2;
  const int64_t kinds = counts != nullptr && sums != nullptr ? 2 : 1;
  return launch("statistics", add_kernel, {kinds * tiles.sequences * strips, warps * kWarp, 0, stream, true}, partials,
                static_cast<unsigned>(tiles.blocks_per_sequence), static_cast<unsigned>(E),
                static_cast<unsigned>(strips), counts, sums);
}

}  // namespace anabranch::cuda
