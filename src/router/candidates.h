// Which elements of a row can be among its K largest: those at or above a bound that K elements reach. The bound is the
// K-th of the maxima of `16 sets` interleaved parts of the row; it costs a comparison an element, and lets through
// little more than K of them. Rows are padded with -inf; NaN is larger than everything (score.h) and always let through.
// Internal linkage: included by *.isa.cc files.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "router/row.h"
#include "router/topk.h"

namespace anabranch {
namespace {

// Sets of kRowPad parts for a bound of the top k of a row. One and a half times as many parts as k let through about
// k + k/3 elements; 0: the row is so short that the bound would take longer than it saves.
inline int64_t bound_sets(int64_t k, int64_t blocks) {
  int64_t sets = 1;
  while (2 * sets * kRowPad < 3 * k) sets *= 2;
  return blocks >= 2 * sets ? sets : 0;
}

// maxima[j] = the largest number among x[j], x[j + 16 sets], x[j + 2 16 sets], ...; -inf where there is none.
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
    __builtin_memcpy(maxima + set * kRowPad, top, sizeof(top));
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// lanes[mask]: the lanes that are set in an 8-bit mask, ascending.
struct LanesOfMask {
  alignas(8) uint8_t lanes[256][8] = {};
  constexpr LanesOfMask() {
    for (int mask = 0; mask < 256; ++mask) {
      int n = 0;
      for (int lane = 0; lane < 8; ++lane) {
        if ((mask >> lane & 1) != 0) lanes[mask][n++] = static_cast<uint8_t>(lane);
      }
    }
  }
};
constexpr LanesOfMask kLanesOfMask;
#endif

// values and positions of the elements e < count that are not below the bound, in order; returns how many. Both have
// room for count + kRowPad.
inline int64_t elements_from(float bound, const float* x, int64_t count, float* values, int32_t* positions) {
  int64_t n = 0;
#if defined(__AVX512F__)
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t e = 0; e < count; e += 16) {
    const __m512 v = _mm512_loadu_ps(x + e);
    const auto inside = static_cast<__mmask16>(count - e < 16 ? (1u << (count - e)) - 1 : 0xffffu);
    const __mmask16 mask = _mm512_mask_cmp_ps_mask(inside, v, _mm512_set1_ps(bound), _CMP_NLT_UQ);
    const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(e)));
    _mm512_storeu_ps(values + n, _mm512_maskz_compress_ps(mask, v));
    _mm512_storeu_si512(positions + n, _mm512_maskz_compress_epi32(mask, at));
    n += __builtin_popcount(mask);
  }
#elif defined(__AVX2__)
  for (int64_t e = 0; e < count; e += 8) {
    const __m256 v = _mm256_loadu_ps(x + e);
    auto mask = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(bound), _CMP_NLT_UQ)));
    if (count - e < 8) mask &= (1u << (count - e)) - 1;
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kLanesOfMask.lanes[mask]));
    const __m256i lanes = _mm256_cvtepu8_epi32(bytes);
    const __m256i at = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int32_t>(e)));
    _mm256_storeu_ps(values + n, _mm256_permutevar8x32_ps(v, lanes));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions + n), at);
    n += __builtin_popcount(mask);
  }
#else
  for (int64_t e = 0; e < count; ++e) {
    values[n] = x[e];
    positions[n] = static_cast<int32_t>(e);
    n += !(x[e] < bound);
  }
#endif
  return n;
}

}  // namespace
}  // namespace anabranch
