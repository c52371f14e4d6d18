// Sums over the threads of a block.
#pragma once

#include "core/cuda/warp.cuh"

namespace anabranch::cuda {

// Exclusive prefix sum over the threads of a block; *total is the sum over all threads. All threads of the block must
// call it; the block consists of whole warps. Consecutive calls need no barrier between them. Only the first
// `active_warps`, the same number in all threads, may have values other than 0.
template <class T>
__device__ T sum_before(T value, T* total, int active_warps) {
  __shared__ T warps[kWarp];
  T sum = value;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const T other = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane_index() >= distance) sum += other;
  }
  __syncthreads();
  if (lane_index() == kWarp - 1) warps[warp_index()] = sum;
  __syncthreads();
  T before = sum - value;
  *total = 0;
  for (int warp = 0; warp < active_warps; ++warp) {
    if (warp < warp_index()) before += warps[warp];
    *total += warps[warp];
  }
  return before;
}

template <class T>
__device__ T sum_before(T value, T* total) {
  return sum_before(value, total, static_cast<int>(blockDim.x) / kWarp);
}

}  // namespace anabranch::cuda
