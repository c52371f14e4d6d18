// Sorts keys in registers: within one lane by sorting networks, or over adjacent lanes by bitonic merges. All loops are
// unrolled and all indices constant, so arrays stay in registers.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/cuda/warp.cuh"
#include "router/cuda/instructions.cuh"

namespace anabranch::cuda {

template <class Key>
__device__ __forceinline__ Key max_key(Key a, Key b) {
  return a > b ? a : b;
}
template <class Key>
__device__ __forceinline__ Key min_key(Key a, Key b) {
  return a > b ? b : a;
}
__device__ __forceinline__ __nv_bfloat162 max_key(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmax2(a, b); }
__device__ __forceinline__ __nv_bfloat162 min_key(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmin2(a, b); }

template <class Key>
__device__ __forceinline__ void order(Key& larger, Key& smaller) {
  const Key a = larger;
  larger = max_key(a, smaller);
  smaller = min_key(a, smaller);
}

// The comparators of Batcher's odd-even merge sort of n keys.
template <int n>
struct Network {
  int first[n * n] = {};
  int second[n * n] = {};
  int size = 0;

  constexpr Network() {
    for (int p = 1; p < n; p *= 2) {
      for (int k = p; k >= 1; k /= 2) {
        for (int j = k % p; j + k < n; j += 2 * k) {
          for (int i = 0; i < k && i + j + k < n; ++i) {
            if ((i + j) / (2 * p) != (i + j + k) / (2 * p)) continue;
            first[size] = i + j;
            second[size++] = i + j + k;
          }
        }
      }
    }
  }
};
template <int n>
constexpr Network<n> kNetwork;

template <int n, class Key, size_t... kComparators>
__device__ __forceinline__ void apply_network(Key (&keys)[n], std::index_sequence<kComparators...>) {
  (order(keys[std::integral_constant<int, kNetwork<n>.first[kComparators]>::value],
         keys[std::integral_constant<int, kNetwork<n>.second[kComparators]>::value]),
   ...);
}

// Sorts in descending order.
template <int n, class Key>
__device__ __forceinline__ void sort(Key (&keys)[n]) {
  apply_network(keys, std::make_index_sequence<kNetwork<n>.size>());
}

// Sorts a bitonic sequence in descending order.
template <int n, class Key, int distance = n / 2>
__device__ __forceinline__ void sort_bitonic(Key (&keys)[n]) {
  if constexpr (distance >= 1) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if ((i & distance) == 0) order(keys[i], keys[i + distance]);
    }
    sort_bitonic<n, Key, distance / 2>(keys);
  }
}

// list = the kList largest of make_key(0) ... make_key(kItems - 1), descending, padded with 0.
template <int kItems, int kList, class Key, class MakeKey>
__device__ __forceinline__ void sorted_topk(const MakeKey& make_key, Key (&list)[kList]) {
#pragma unroll
  for (int first = 0; first < kItems; first += kList) {
    Key chunk[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) chunk[i] = first + i < kItems ? make_key(first + i) : Key{};
    sort(chunk);
    if (first == 0) {
#pragma unroll
      for (int i = 0; i < kList; ++i) list[i] = chunk[i];
    } else {
      // The larger elements of the pairs from opposite ends are the kList largest of both lists, and form a bitonic
      // sequence.
#pragma unroll
      for (int i = 0; i < kList; ++i) list[i] = max_key(list[i], chunk[kList - 1 - i]);
      sort_bitonic(list);
    }
  }
}

// Compares keys at `distance`, in sequences of `size`; if mirrored, the two ends of each sequence.
template <int n, int size, int distance, bool mirrored, class Key>
__device__ __forceinline__ void merge_step(Key (&keys)[n], unsigned lane) {
  if constexpr (distance >= n) {
    constexpr int kOther = mirrored ? size / n - 1 : distance / n;  // the partner differs in these bits of the lane
    const bool smaller = (lane & (distance / n)) != 0;
    Key others[n];
#pragma unroll
    for (int i = 0; i < n; ++i) others[i] = __shfl_xor_sync(kAllLanes, keys[mirrored ? n - 1 - i : i], kOther);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      keys[i] = min_or_max(keys[i], others[i], smaller);
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if ((i & distance) == 0) order(keys[i], keys[mirrored ? i ^ (size - 1) : i + distance]);
    }
  }
  if constexpr (distance > 1) merge_step<n, size, distance / 2, false>(keys, lane);
}

// Sorts the n keys of each of kLanes adjacent lanes in descending order: lane l gets ranks l * n and following. A
// bitonic sort whose merges begin with a mirrored step, so that all comparisons have one direction. n is a power of
// two.
template <int kLanes, int n, class Key, int size = 2>
__device__ __forceinline__ void sort_lanes(Key (&keys)[n], unsigned lane) {
  if constexpr (size <= kLanes * n) {
    merge_step<n, size, size / 2, true>(keys, lane);
    sort_lanes<kLanes, n, Key, 2 * size>(keys, lane);
  }
}

}  // namespace anabranch::cuda
