// The K best of a row of experts that the registers of kLanes neighbouring lanes hold, by a filter.
//
// 1. Values q are rounded to bfloat16, two to a word, and cut into chunks. The kList-th largest of the chunks' maxima
//    is a threshold that at least kList >= K values reach; rounding keeps the order, so the K best are among those.
// 2. The few experts that reach it, the candidates, go to shared memory in ascending order.
// 3. Candidates are sorted by q exactly, by keys of 32 bits. 2-byte values leave room for the expert, so that the lower
//    one wins a tie. Else the lowest bits hold the place in the list, the others q's own bits or its distance above the
//    threshold; a pair that missing bits have put the wrong way round is found and reported.
//
// Rows with NaN and rows with too many candidates (many equal values) are reported, too: select.cuh serves them.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/cuda/shared_array.cuh"
#include "core/cuda/warp.cuh"
#include "router/cuda/sort.cuh"
#include "router/score.h"

namespace anabranch::cuda {

// The greatest power of two that is not above n.
constexpr int power_of_two_below(int n) {
  int power = 1;
  while (2 * power <= n) power *= 2;
  return power;
}

// ordered_bits (score.h) of a q that is not NaN, in fewer instructions: the addition makes -0 to +0.
__device__ __forceinline__ uint32_t ordered_key(float q) {
  const int32_t bits = __float_as_int(__fadd_rn(q, 0.0f));
  return static_cast<uint32_t>(bits) ^ (static_cast<uint32_t>(bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ __nv_bfloat162 swap_halves(__nv_bfloat162 pair) {
  return __halves2bfloat162(pair.y, pair.x);
}

// kFineness: the finer the chunks, the fewer rows have more than kCandidates.
template <int kLanes, int kItems, int kList, int kFineness = 1>
struct Filter {
  using Mask = std::conditional_t<(kItems > 32), uint64_t, uint32_t>;  // a bit an item
  static constexpr int kWords = kItems / 2;
  // Words of a lane's chunks: 4 chunks of the row for each one that is wanted, if the row has them. Of their maxima as
  // many as the list has can matter.
  static constexpr int kWanted = 2 * kFineness * kList / kLanes > 1 ? 2 * kFineness * kList / kLanes : 1;
  static constexpr int kChunks = std::min({kWanted, std::max(kList, 8), power_of_two_below(kWords)});
  static constexpr int kMaxima = std::min(kChunks, kList);
  static constexpr bool kExists = kMaxima * kLanes >= kList;

  static constexpr int kCandidates = 2 * kList > kLanes ? 2 * kList : kLanes;  // of a row, at most
  static constexpr int kOwn = kCandidates / kLanes;                            // of them a lane's
  static constexpr uint32_t kExpertBits = 0x1fff;                              // zeros of 2-byte values as float32

  __nv_bfloat162 words[kWords];  // item i and item i + kWords

  // The largest maxima of chunks, and that of all, NaN where there is one in the lane's part of the row.
  struct Maxima {
    __nv_bfloat162 words[kMaxima];
    __nv_bfloat162 all;
  };
  __device__ __forceinline__ Maxima maxima() const {
    __nv_bfloat162 chunks[kChunks];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      chunks[w % kChunks] = w < kChunks ? words[w] : __hmax2_nan(chunks[w % kChunks], words[w]);
    }
    Maxima m;
    m.all = chunks[0];
#pragma unroll
    for (int w = 1; w < kChunks; ++w) m.all = __hmax2_nan(m.all, chunks[w]);
    if constexpr (kChunks > kMaxima) {
      top_of_items<kChunks>([&](int i) { return chunks[i]; }, m.words);
    } else {
#pragma unroll
      for (int w = 0; w < kMaxima; ++w) m.words[w] = chunks[w];
    }
    return m;
  }

  // The kList-th largest of the row's chunk maxima, or with kNext the one after it, in both halves.
  template <bool kNext>
  static __device__ __forceinline__ __nv_bfloat162 threshold(__nv_bfloat162 (&maxima)[kMaxima], unsigned lane) {
    sort_lanes<kLanes>(maxima, lane);
    // Two descending sequences a, b, in the halves. The n-th of both is min over i < n of max(a_i, b_(n-1-i)): where
    // i = kList, the other half has its pair.
    constexpr int kOwners = kList / kMaxima;
    __nv_bfloat162 after_last;
    if constexpr (kNext) {
      static_assert(kOwners < kLanes, "the lane after the last owner holds the next maximum");
      after_last = __shfl_down_sync(kAllLanes, maxima[0], 1, kLanes);
    }
    __nv_bfloat162 least;
#pragma unroll
    for (int i = 0; i < kMaxima; ++i) {
      const int last = kMaxima - 1 - i + kNext;
      __nv_bfloat162 opposite = last < kMaxima ? maxima[last] : after_last;
      if constexpr (kOwners > 1) opposite = __shfl_xor_sync(kAllLanes, opposite, kOwners - 1);
      const __nv_bfloat162 larger = __hmax2(maxima[i], swap_halves(opposite));
      least = i == 0 ? larger : __hmin2(least, larger);
    }
#pragma unroll
    for (int distance = 1; distance < kOwners; distance *= 2) {
      least = __hmin2(least, __shfl_xor_sync(kAllLanes, least, distance));
    }
    if constexpr (kOwners < kLanes) least = __shfl_sync(kAllLanes, least, 0, kLanes);
    return __hmin2(least, swap_halves(least));
  }

  // Bit i is set where item i reaches the threshold.
  __device__ __forceinline__ Mask reached(__nv_bfloat162 threshold) const {
    return bits_where([threshold](__nv_bfloat162 word) { return __hge2_mask(word, threshold); });
  }

  static __device__ __forceinline__ unsigned lowest(Mask bits) {
    return static_cast<unsigned>(kItems > 32 ? __ffsll(static_cast<long long>(bits)) : __ffs(static_cast<int>(bits))) -
           1;
  }

  // Bit i is set where the half of item i in is_in(word) is.
  template <class IsIn>
  __device__ __forceinline__ Mask bits_where(const IsIn& is_in) const {
    uint32_t bits[2] = {};  // of words 0 to 15 and of those from 16 on, each as it lies in a word
#pragma unroll
    for (int w = 0; w < kWords; ++w) bits[w / 16] |= is_in(words[w]) & (0x00010001u << w % 16);
    if constexpr (kWords == 16) return bits[0];
    const uint32_t first = (bits[0] & 0xffffu) | bits[1] << 16;
    const uint32_t second = bits[0] >> 16 | (bits[1] & 0xffff0000u);
    return first | static_cast<Mask>(second) << kWords;
  }

  // Writes the experts first + i of the set bits to the row's list, lane by lane, as far as it goes. Returns how many
  // there are in the row.
  static __device__ __forceinline__ unsigned collect(Mask bits, unsigned first, unsigned lane,
                                                     const SharedArray<uint16_t>& list) {
    const auto own = static_cast<unsigned>(kItems > 32 ? __popcll(bits) : __popc(static_cast<unsigned>(bits)));
    unsigned through = own;  // this lane's and those of the lanes before
#pragma unroll
    for (unsigned distance = 1; distance < kLanes; distance *= 2) {
      const unsigned others = __shfl_up_sync(kAllLanes, through, distance, kLanes);
      if (lane >= distance) through += others;
    }
    unsigned place = list.from(through - own).address();
    const unsigned end = list.from(kCandidates).address();
#pragma unroll 1
    while (bits != 0 && place < end) {
      const Mask rest = bits & (bits - 1);
      store_shared(place, static_cast<uint16_t>(first + lowest(bits)));
      if (rest != 0 && place + 2 < end) store_shared(place + 2, static_cast<uint16_t>(first + lowest(rest)));
      place += 4;
      bits = rest & (rest - 1);
    }
    return __shfl_sync(kAllLanes, through, kLanes - 1, kLanes);
  }

  // Sorts the row's candidates: experts[r] = the one of rank r, for r < count; past that, anything. value_of(expert) =
  // q, asked for expert 0 where there is no candidate. For 2-byte q.
  template <class ValueOf>
  static __device__ __forceinline__ void sort_exactly(const SharedArray<uint16_t>& list, unsigned count, unsigned lane,
                                                      const ValueOf& value_of, const SharedArray<int32_t>& experts) {
    static_assert(kLanes * kItems <= kExpertBits + 1, "an expert index fits its bits of a key");
    uint32_t keys[kOwn];
    float q[kOwn];
    const unsigned first = lane * kOwn;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) keys[i] = first + i < count ? list[first + i] : 0u;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) q[i] = value_of(keys[i]);
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) {
      const uint32_t key = (ordered_key(q[i]) & ~kExpertBits) | (kExpertBits - keys[i]);
      keys[i] = first + i < count ? key : 0u;
    }
    sort_lanes<kLanes>(keys, lane);
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) experts.set(first + i, static_cast<int32_t>(~keys[i] & kExpertBits));
  }

  // The same for any q. Returns whether neighbours may stand the wrong way round. least_q: no candidate is below it by
  // more than 2^15 units of its last place. values: scratch for kCandidates floats.
  template <class ValueOf>
  static __device__ __forceinline__ bool sort_nearly(const SharedArray<uint16_t>& list, unsigned count, unsigned lane,
                                                     float least_q, const SharedArray<float>& values,
                                                     const ValueOf& value_of, const SharedArray<int32_t>& experts) {
    constexpr uint32_t kPlace = kCandidates - 1;
    constexpr uint32_t kMost = kAllLanes / kCandidates;
    uint32_t keys[kOwn];
    float q[kOwn + 1];
    const unsigned first = lane * kOwn;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) keys[i] = first + i < count ? list[first + i] : 0u;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) q[i] = value_of(keys[i]);
    // Values of 32 bits above a positive least one: keys hold their distance from it, all of it if it is short enough.
    uint32_t least = 0;
    const uint32_t of_least = ordered_key(least_q);
    if (of_least > 0x80000000u) least = of_least - 0x8001u;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) values.set(first + i, q[i]);
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) {
      const uint32_t bits = ordered_key(q[i]);
      const uint32_t code = kPlace - (first + i);
      uint32_t key = (bits & ~kPlace) | code;
      if (least != 0) key = min(bits - least, kMost) * kCandidates + code;
      keys[i] = first + i < count ? key : 0u;
    }
    sort_lanes<kLanes>(keys, lane);
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) experts.set(first + i, list[~keys[i] & kPlace]);
    __syncwarp();
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) q[i] = first + i < count ? values[~keys[i] & kPlace] : -INFINITY;
    const float next = __shfl_down_sync(kAllLanes, q[0], 1, kLanes);
    q[kOwn] = lane + 1 < kLanes ? next : -INFINITY;
    bool wrong = false;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) wrong |= q[i] < q[i + 1];
    return wrong;
  }
};

}  // namespace anabranch::cuda
