#include "balance/statistics.cuh"

namespace anabranch::cuda {
namespace {

constexpr int kWarps = 8;

// A block sums 32 columns of one sequence: its warps take the blocks of tokens in turns, and are added up in order.
template <class Total, class T>
__device__ void add_columns(const T* partial, int64_t blocks, int64_t E, int64_t column, Total (&shared)[kWarps][kWarp],
                            T* out) {
  Total total = 0;
  if (column < E) {
#pragma unroll 4
    for (int64_t block = warp_index(); block < blocks; block += kWarps) {
      total += static_cast<Total>(partial[block * E + column]);
    }
  }
  shared[warp_index()][lane_index()] = total;
  __syncthreads();
  if (warp_index() == 0 && column < E) {
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) total += shared[warp][lane_index()];
    out[column] = static_cast<T>(total);
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kWarps* kWarp)
    add_kernel(Partials partials, int64_t blocks, int64_t E, int64_t strips, int32_t* counts, float* sums) {
  __shared__ double shared_sums[kWarps][kWarp];
  __shared__ int32_t shared_counts[kWarps][kWarp];
  wait_for_previous_kernel();
  const int64_t sequence = blockIdx.x / strips;
  const int64_t column = blockIdx.x % strips * kWarp + lane_index();
  const int64_t first = sequence * blocks * E;
  if (counts != nullptr) {
    add_columns(partials.counts + first, blocks, E, column, shared_counts, counts + sequence * E);
  }
  if (sums != nullptr) add_columns(partials.sums + first, blocks, E, column, shared_sums, sums + sequence * E);
}

}  // namespace

ab_status add_partials(const TokenTiles& tiles, int64_t E, const Partials& partials, int32_t* counts, float* sums,
                       cudaStream_t stream) {
  if (counts == nullptr && sums == nullptr) return ok();
  if (tiles.blocks_per_sequence == 1) return ok();
  const int64_t strips = (E + kWarp - 1) / kWarp;
  return launch("statistics", add_kernel, {tiles.sequences * strips, kWarps * kWarp, 0, stream, true}, partials,
                tiles.blocks_per_sequence, E, strips, counts, sums);
}

}  // namespace anabranch::cuda
