// Distributes the columns of a row over warps. A warp processes four vectors per lane, interleaved over its lanes: 2
// KiB of a row with 16-byte accesses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/cuda/vector.cuh"
#include "core/cuda/warp.cuh"
#include "dispatch/elements.h"

namespace anabranch::cuda {

// A block whose warps each process one part of a row.
struct PartsBlock {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarp;
};

// Part `part` of a row of `width` elements, from the view of one lane: its vectors are kStep elements apart.
template <int N, int kVectorsOfLane = 4>
struct Columns {
  static constexpr int kVectors = kVectorsOfLane;
  static constexpr int kStep = kWarp * N;
  static constexpr int kPart = kVectors * kStep;

  int64_t first;
  int count;  // vectors inside the row

  __device__ __forceinline__ Columns(int64_t part, int64_t width) : first(part * kPart + lane_index() * N) {
    const int64_t remaining = width - first;
    count = remaining <= 0                       ? 0
            : remaining > (kVectors - 1) * kStep ? kVectors
                                                 : (static_cast<int>(remaining) + kStep - 1) / kStep;
  }

  // The number of parts per row; at least one.
  static int64_t parts(int64_t width) { return std::max<int64_t>((width + kPart - 1) / kPart, 1); }
};

// The vectors of a lane. Vectors outside the row are neither read nor written; their value is unspecified.
template <class T, int N, int kVectors = Columns<N>::kVectors>
struct Vectors {
  Vector<T, N> vectors[kVectors];

  // `from` and `to` point at the first vector.
  __device__ __forceinline__ void load(const T* from, int count) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors[v].load_if(v < count, from + v * Columns<N>::kStep);
  }
  __device__ __forceinline__ void store(T* to, int count) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors[v].store_if(v < count, to + v * Columns<N>::kStep);
  }
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors[v].forget();
  }
  __device__ __forceinline__ const Vector<T, N>& operator[](int v) const { return vectors[v]; }
};

// weight * x, converted to another dtype.
template <class To, class X, int N>
__device__ __forceinline__ Vectors<To, N> scaled(const Vectors<X, N>& x, float weight) {
  Vectors<To, N> result;
#pragma unroll
  for (int v = 0; v < Columns<N>::kVectors; ++v) {
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = weight * x[v][i];
    result.vectors[v] = Vector<To, N>::from(values);
  }
  return result;
}

// The number of rows that a lane loads concurrently, for accesses of kBytes.
template <int kBytes>
constexpr int kRowsInFlight = kBytes == kAccessBytes ? 2 : 4;

// Calls f(X{}, Y{}, std::integral_constant<int, N>{}) with the row types of two tensors and the number of elements per
// access. N is the number of elements of the larger type in 16 bytes if both tensors are aligned to N elements and
// `third`, of any float type, to 16 bytes; else N = 1.
template <class F>
ab_status with_row_types(const Rows& x, const Rows& y, F&& f, const void* third = nullptr) {
  return with_float_type(x.dtype, [&]<class X>(X) {
    return with_float_type(y.dtype, [&]<class Y>(Y) {
      constexpr int N = kAccessBytes / std::max<int>(sizeof(X), sizeof(Y));
      const bool aligned = x.D % N == 0 && y.D % N == 0 && address(x.data) % (N * sizeof(X)) == 0 &&
                           address(y.data) % (N * sizeof(Y)) == 0 && address(third) % kAccessBytes == 0;
      return aligned ? f(X{}, Y{}, std::integral_constant<int, N>{}) : f(X{}, Y{}, std::integral_constant<int, 1>{});
    });
  });
}

}  // namespace anabranch::cuda
