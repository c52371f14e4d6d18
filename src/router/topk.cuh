// The K largest 32-bit keys of a token whose experts lie in the registers of a few lanes.
//
// A key holds the order-preserving bits of q (score.h), of which the low kIndexBits make room for the place of the
// expert, complemented: one integer comparison orders by q, then by expert. Where q has that many zero bits (bfloat16
// and float16 logits without a bias) keys are exact. Else selected keys that agree in all other bits, at the edge of
// the selection or within it, must be told apart by q itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/cuda/warp.cuh"
#include "router/score.h"

namespace anabranch::cuda {

// The least power of two that is not below n.
constexpr int power_of_two_above(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Lane `lane` of a token's kLanes holds experts lane * kItems ... + kItems - 1.
template <int kLanes, int kItems>
struct Place {
  static constexpr int kItemRange = power_of_two_above(kItems);
  static constexpr uint32_t kIndexMask = kLanes * kItemRange - 1;

  // The low bits of a key: its item's part and its lane's part.
  static __device__ __forceinline__ uint32_t of_item(int item) { return static_cast<uint32_t>(kItemRange - 1 - item); }
  static __device__ __forceinline__ uint32_t of_lane(int lane) {
    return static_cast<uint32_t>((kLanes - 1 - lane) * kItemRange);
  }
  static __device__ __forceinline__ int expert(uint32_t key) {
    const int code = static_cast<int>(kIndexMask - (key & kIndexMask));
    return code / kItemRange * kItems + code % kItemRange;
  }
};

// ordered_bits (score.h) in fewer instructions: the addition makes -0 to +0 and every NaN the positive quiet one.
__device__ __forceinline__ uint32_t ordered_key(float q) {
  const int32_t bits = __float_as_int(__fadd_rn(q, 0.0f));
  return static_cast<uint32_t>(bits) ^ (static_cast<uint32_t>(bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ void order(uint32_t& larger, uint32_t& smaller) {
  const uint32_t a = larger;
  larger = max(a, smaller);
  smaller = min(a, smaller);
}

// The comparators of Batcher's odd-even merge sort of n keys. A table, so that every index is a constant where the
// network is applied: arrays stay in registers.
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

template <int n, size_t... kComparators>
__device__ __forceinline__ void apply_network(uint32_t (&keys)[n], std::index_sequence<kComparators...>) {
  (order(keys[std::integral_constant<int, kNetwork<n>.first[kComparators]>::value],
         keys[std::integral_constant<int, kNetwork<n>.second[kComparators]>::value]),
   ...);
}

// Sorts, descending.
template <int n>
__device__ __forceinline__ void sort(uint32_t (&keys)[n]) {
  apply_network(keys, std::make_index_sequence<kNetwork<n>.size>());
}

// Sorts a bitonic sequence, descending.
template <int n, int distance = n / 2>
__device__ __forceinline__ void sort_bitonic(uint32_t (&keys)[n]) {
  if constexpr (distance >= 1) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if ((i & distance) == 0) order(keys[i], keys[i + distance]);
    }
    sort_bitonic<n, distance / 2>(keys);
  }
}

// The largest key that lists leave out, where it is wanted.
struct Rest {
  bool wanted;
  uint32_t key;
};

// keys = the n largest of two descending lists, descending: the larger of opposite ends is a bitonic sequence.
template <int n>
__device__ __forceinline__ void merge(uint32_t (&keys)[n], const uint32_t (&others)[n], Rest& rest) {
  if (rest.wanted) {
#pragma unroll
    for (int i = 0; i < n; ++i) rest.key = max(rest.key, min(keys[i], others[n - 1 - i]));
  }
#pragma unroll
  for (int i = 0; i < n; ++i) keys[i] = max(keys[i], others[n - 1 - i]);
  sort_bitonic(keys);
}

// list = the kList largest of key(0) ... key(kItems - 1), descending; 0 where there are fewer.
template <int kItems, int kList, class Key>
__device__ __forceinline__ void top_of_items(const Key& key, uint32_t (&list)[kList], Rest& rest) {
#pragma unroll
  for (int first = 0; first < kItems; first += kList) {
    uint32_t chunk[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) chunk[i] = first + i < kItems ? key(first + i) : 0u;
    sort(chunk);
    if (first == 0) {
#pragma unroll
      for (int i = 0; i < kList; ++i) list[i] = chunk[i];
    } else {
      merge(list, chunk, rest);
    }
  }
}

// Makes the lists of each kLanes neighbouring lanes one list, the same in all of them.
template <int kLanes, int kList>
__device__ __forceinline__ void join_lanes(uint32_t (&list)[kList], Rest& rest) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    uint32_t others[kList];
#pragma unroll
    for (int i = 0; i < kList; ++i) others[i] = __shfl_xor_sync(kAllLanes, list[i], distance);
    if (rest.wanted) rest.key = max(rest.key, __shfl_xor_sync(kAllLanes, rest.key, distance));
    merge(list, others, rest);
  }
}

}  // namespace anabranch::cuda
