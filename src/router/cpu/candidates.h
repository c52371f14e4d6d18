// Finds the elements of a row that can be among its K largest: those at or above a lower bound that at least K elements
// reach. The bound is the K-th largest of the maxima of 16 * sets interleaved parts of the row. It costs one comparison
// per element, and only slightly more than K elements pass. Rows are padded with -inf. NaN is larger than everything
// (score.h) and always passes. Internal linkage: *.isa.cc files include this header.
#pragma once

#include <cstdint>

#include "router/cpu/row.h"
#include "router/cpu/topk.h"

namespace anabranch {
namespace {

// The number of sets, of kRowPad parts each, for a bound of the top k of a row. With 1.5 k parts the bound passes about
// k + k/3 elements. Returns 0 if the row is so short that the bound would cost more than it saves.
inline int64_t bound_sets(int64_t k, int64_t blocks) {
  int64_t sets = 1;
  while (2 * sets * kRowPad < 3 * k) sets *= 2;
  return blocks >= 2 * sets ? sets : 0;
}

// maxima[j] = the maximum of x[j], x[j + n], x[j + 2 n], ... with n = 16 sets; -inf if all of these are NaN.
inline void part_maxima(const float* x, int64_t blocks, int64_t sets, float* maxima) {
  for (int64_t set = 0; set < sets; ++set) {
    Floats top[kAccumulators];
#pragma GCC unroll 4
    for (int i = 0; i < kAccumulators; ++i) top[i] = -__builtin_inff() - Floats{};
    for (int64_t block = set; block < blocks; block += sets) {
#pragma GCC unroll 4
      for (int i = 0; i < kAccumulators; ++i) {
        const Floats v = load_floats(x + block * kRowPad + i * kFloats);
        top[i] = v > top[i] ? v : top[i];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kAccumulators; ++i) store_floats(maxima + set * kRowPad + i * kFloats, top[i]);
  }
}

// Bit i is set if element i of kFloats elements is not below the bound.
[[gnu::always_inline]] inline uint64_t not_below(float bound, const float* x) {
  const Floats v = load_floats(x);
  const Floats least = bound - Floats{};
#if defined(__AVX512F__)
  constexpr int kNotLess = 0x15;  // "not less than", true for NaN, raises no exceptions
  constexpr int kCurrentRounding = 4;
  return static_cast<uint16_t>(__builtin_ia32_cmpps512_mask(v, least, kNotLess, 0xffff, kCurrentRounding));
#elif defined(__AVX__)
  return static_cast<uint32_t>(__builtin_ia32_movmskps256(__builtin_bit_cast(Floats, ~(v < least))));
#elif defined(__SSE__)
  return static_cast<uint32_t>(__builtin_ia32_movmskps(__builtin_bit_cast(Floats, ~(v < least))));
#else
  uint64_t bits = 0;
  for (int i = 0; i < kFloats; ++i) bits |= static_cast<uint64_t>(!(v[i] < least[i])) << i;
  return bits;
#endif
}

// not_below() of `vectors` vectors, up to 64 elements.
[[gnu::always_inline]] inline uint64_t word_not_below(float bound, const float* x, int64_t vectors) {
  uint64_t word = 0;
  for (int64_t i = 0; i < vectors; ++i) word |= not_below(bound, x + i * kFloats) << i * kFloats;
  return word;
}

// positions[0 .. n) = the elements e < count that are not below the bound, ascending; values[] = their values; returns
// n. After k elements, further elements equal to the bound are skipped: the k before them rank higher. Both arrays need
// space for kAtOnce more elements: the loop extracts kAtOnce bits of a word before it tests for more, so that the usual
// number of bits causes no branch misprediction.
constexpr int kAtOnce = 4;

inline int64_t elements_not_below(float bound, int64_t k, const float* x, int64_t count, int32_t* positions,
                                  float* values) {
  constexpr int64_t kWord = 64;
  const float next = from_ordered_bits(ordered_bits(bound) + 1);  // the smallest float above the bound
  int64_t n = 0;
  for (int64_t first = 0; first < count; first += kWord) {
    const int64_t width = count - first < kWord ? count - first : kWord;
    const uint64_t last = uint64_t{1} << (width - 1);
    uint64_t word = width == kWord ? word_not_below(bound, x + first, kWord / kFloats)
                                   : word_not_below(bound, x + first, (width + kFloats - 1) / kFloats);
    word &= last | (last - 1);
    const int64_t end = n + __builtin_popcountll(word);
    for (; n < end; n += kAtOnce) {
#pragma GCC unroll 4
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t e = first + __builtin_ctzll(word | last);
        positions[n + i] = static_cast<int32_t>(e);
        values[n + i] = x[e];
        word &= word - 1;
      }
    }
    n = end;
    if (n >= k) bound = next;
  }
  return n;
}

}  // namespace
}  // namespace anabranch
