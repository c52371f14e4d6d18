// Selects the K best of a row of experts, held in the registers of kLanes adjacent lanes, by a filter in three steps.
//
// 1. Values q are rounded to bfloat16, two per word, and divided into chunks. The kList-th largest of the chunk maxima
// is a threshold that at least kList >= K values reach. Rounding is monotonic, so these include the K best.
// 2. The few experts that reach the threshold, the candidates, are written to shared memory in ascending order.
// 3. Candidates are sorted by q, with 32-bit keys. 2-byte values leave enough bits for the expert, so that the lower
// expert wins a tie. For 4-byte values the low bits hold the position in the list, and the others the high bits of q
// or its distance from the threshold; a pair in the wrong order because of missing bits is detected and reported.
//
// Rows with NaN and rows with too many candidates (many equal values) are reported, too; select.cuh handles them.
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

// The largest power of two that is at most n.
constexpr int power_of_two_below(int n) {
  int power = 1;
  while (2 * power <= n) power *= 2;
  return power;
}

// ordered_bits (score.h) of a q that is not NaN, in fewer instructions: the addition converts -0 to +0.
__device__ __forceinline__ uint32_t ordered_key(float q) {
  const int32_t bits = __float_as_int(__fadd_rn(q, 0.0f));
  return static_cast<uint32_t>(bits) ^ (static_cast<uint32_t>(bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ __nv_bfloat162 swap_halves(__nv_bfloat162 pair) {
  return __halves2bfloat162(pair.y, pair.x);
}

// kFineness: finer chunks make rows with more than kCandidates candidates rarer.
template <int kLanes, int kItems, int kList, int kFineness = 1>
struct Filter {
  using Mask = std::conditional_t<(kItems > 32), uint64_t, uint32_t>;  // one bit per item
  static constexpr int kWords = kItems / 2;
  // A lane divides its words into kChunks groups. Each group is two chunks of the row, one per half of the words. The
  // target is 4 kFineness chunks of the row per list entry. At most kList of the maxima can matter.
  static constexpr int kTargetChunks = 2 * kFineness * kList / kLanes > 1 ? 2 * kFineness * kList / kLanes : 1;
  static constexpr int kChunks = std::min({kTargetChunks, std::max(kList, 8), power_of_two_below(kWords)});
  static constexpr int kMaxima = std::min(kChunks, kList);
  static constexpr bool kExists = kMaxima * kLanes >= kList;

  static constexpr int kCandidates = 2 * kList > kLanes ? 2 * kList : kLanes;  // per row, at most
  static constexpr int kOwn = kCandidates / kLanes;                            // candidates per lane
  static constexpr uint32_t kExpertBits = 0x1fff;  // low bits that are zero in 2-byte values

  __nv_bfloat162 words[kWords];  // item i and item i + kWords

  // The largest chunk maxima, and the overall maximum, which is NaN if the lane's part of the row contains NaN.
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
      sorted_topk<kChunks>([&](int i) { return chunks[i]; }, m.words);
    } else {
#pragma unroll
      for (int w = 0; w < kMaxima; ++w) m.words[w] = chunks[w];
    }
    return m;
  }

  // The kList-th largest of the row's chunk maxima, or with kNext the one after it, in both halves of the word.
  template <bool kNext>
  static __device__ __forceinline__ __nv_bfloat162 threshold(__nv_bfloat162 (&maxima)[kMaxima], unsigned lane) {
    sort_lanes<kLanes>(maxima, lane);
    // The halves hold two descending sequences a, b. The n-th largest of both is min over i < n of max(a_i, b_(n-1-i));
    // at i = kList only the other half has a pair.
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

  // Bit i is set if item i reaches the threshold.
  __device__ __forceinline__ Mask reached(__nv_bfloat162 threshold) const {
    return bits_where([threshold](__nv_bfloat162 word) { return __hge2_mask(word, threshold); });
  }

  static __device__ __forceinline__ unsigned lowest(Mask bits) {
    return static_cast<unsigned>(kItems > 32 ? __ffsll(static_cast<long long>(bits)) : __ffs(static_cast<int>(bits))) -
           1;
  }

  // Bit i is set if the half of is_in(word) that belongs to item i is set.
  template <class IsIn>
  __device__ __forceinline__ Mask bits_where(const IsIn& is_in) const {
    uint32_t bits[2] = {};  // for words 0 to 15 and for words from 16 on, in the bit order of a word
#pragma unroll
    for (int w = 0; w < kWords; ++w) bits[w / 16] |= is_in(words[w]) & (0x00010001u << w % 16);
    if constexpr (kWords == 16) return bits[0];
    const uint32_t first = (bits[0] & 0xffffu) | bits[1] << 16;
    const uint32_t second = bits[0] >> 16 | (bits[1] & 0xffff0000u);
    return first | static_cast<Mask>(second) << kWords;
  }

  // Appends the experts first + i of the set bits to the row's list, lane by lane, up to its capacity. Returns the
  // number of set bits in the row.
  static __device__ __forceinline__ unsigned collect(Mask bits, unsigned first, unsigned lane,
                                                     const SharedArray<uint16_t>& list) {
    const auto own = static_cast<unsigned>(kItems > 32 ? __popcll(bits) : __popc(static_cast<unsigned>(bits)));
    unsigned through = own;  // inclusive prefix sum over the lanes
#pragma unroll
    for (unsigned distance = 1; distance < kLanes; distance *= 2) {
      const unsigned others = __shfl_up_sync(kAllLanes, through, distance, kLanes);
      if (lane >= distance) through += others;
    }
    unsigned place = list.from(through - own).address();
    const unsigned end = list.from(kCandidates).address();
#pragma unroll 1
    while (bits != 0 && place < end) {
      const Mask remaining = bits & (bits - 1);
      store_shared(place, static_cast<uint16_t>(first + lowest(bits)));
      if (remaining != 0 && place + 2 < end) store_shared(place + 2, static_cast<uint16_t>(first + lowest(remaining)));
      place += 4;
      bits = remaining & (remaining - 1);
    }
    return __shfl_sync(kAllLanes, through, kLanes - 1, kLanes);
  }

  // Sorts the row's candidates by 2-byte q: experts[r] = the expert of rank r, for r < count; later entries are
  // unspecified. get_value(expert) returns q; it is called with expert 0 for entries past the end.
  template <class GetValue>
  static __device__ __forceinline__ void sort_exactly(const SharedArray<uint16_t>& list, unsigned count, unsigned lane,
                                                      const GetValue& get_value, const SharedArray<int32_t>& experts) {
    static_assert(kLanes * kItems <= kExpertBits + 1, "an expert index fits its bits of a key");
    uint32_t keys[kOwn];
    float q[kOwn];
    const unsigned first = lane * kOwn;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) keys[i] = first + i < count ? list[first + i] : 0u;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) q[i] = get_value(keys[i]);
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) {
      const uint32_t key = (ordered_key(q[i]) & ~kExpertBits) | (kExpertBits - keys[i]);
      keys[i] = first + i < count ? key : 0u;
    }
    sort_lanes<kLanes>(keys, lane);
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) experts.set(first + i, static_cast<int32_t>(~keys[i] & kExpertBits));
  }

  // Sorts candidates by any q. Returns whether adjacent entries may be in the wrong order. min_q: no candidate is below
  // it by more than 2^15 units in the last place. values: scratch memory for kCandidates floats.
  template <class GetValue>
  static __device__ __forceinline__ bool sort_approximately(const SharedArray<uint16_t>& list, unsigned count,
                                                            unsigned lane, float min_q,
                                                            const SharedArray<float>& values, const GetValue& get_value,
                                                            const SharedArray<int32_t>& experts) {
    constexpr uint32_t kPlace = kCandidates - 1;
    constexpr uint32_t kMaxDistance = kAllLanes / kCandidates;
    uint32_t keys[kOwn];
    float q[kOwn + 1];
    const unsigned first = lane * kOwn;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) keys[i] = first + i < count ? list[first + i] : 0u;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) q[i] = get_value(keys[i]);
    // For 32-bit values with a positive minimum, keys hold their distance from it, exactly if it is small enough.
    uint32_t least = 0;
    const uint32_t min_q_bits = ordered_key(min_q);
    if (min_q_bits > 0x80000000u) least = min_q_bits - 0x8001u;
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) values.set(first + i, q[i]);
#pragma unroll
    for (unsigned i = 0; i < kOwn; ++i) {
      const uint32_t bits = ordered_key(q[i]);
      const uint32_t code = kPlace - (first + i);
      uint32_t key = (bits & ~kPlace) | code;
      if (least != 0) key = min(bits - least, kMaxDistance) * kCandidates + code;
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
