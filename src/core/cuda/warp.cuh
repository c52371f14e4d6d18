// Collective operations of the threads of a warp, or of a power of two of its lanes. All lanes of the warp take part.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 4 * kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % kWarp); }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x / kWarp); }

// Reduces each group of kLanes adjacent lanes; every lane gets the result.
template <int kLanes, class T, class Combine>
__device__ __forceinline__ T reduce_lanes(T value, const Combine& combine) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

template <int kLanes, class T>
__device__ __forceinline__ T sum_lanes(T value) {
  return reduce_lanes<kLanes>(value, [](T a, T b) { return a + b; });
}

// The maximum; NaN is ignored.
template <int kLanes>
__device__ __forceinline__ float max_lanes(float value) {
  return reduce_lanes<kLanes>(value, [](float a, float b) { return fmaxf(a, b); });
}

template <int kLanes>
__device__ __forceinline__ uint32_t max_lanes(uint32_t value) {
  return reduce_lanes<kLanes>(value, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}

}  // namespace anabranch::cuda
