// core/cuda/mma.cuh on the emulator, written after the tables of the PTX manual and not after the project's own.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/cuda/shared.cuh"
#include "core/dtype.h"

namespace anabranch::cuda {

// Thread i holds of each matrix elements (i / 4, 2 (i % 4)) and (i / 4, 2 (i % 4) + 1), or of its transpose; addresses
// 8 m ... 8 m + 7 are those of matrix m's rows.
template <bool kTransposed>
void load_four_matrices(uint32_t address, uint32_t (&m)[4]) {
  const char (*addresses)[64] = emulation::show(&address, sizeof(address));
  const int lane = static_cast<int>(emulation::thread_index.x % 32);
  const auto element = [&](int matrix, int row, int column) {
    uint32_t begin;
    std::memcpy(&begin, addresses[matrix * 8 + row], sizeof(begin));
    shared_place(begin, 16);
    return load_shared<uint16_t>(begin + static_cast<uint32_t>(column) * 2);
  };
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint32_t halves[2];
    for (int i = 0; i < 2; ++i) {
      const int first = lane / 4;
      const int second = lane % 4 * 2 + i;
      halves[i] = kTransposed ? element(matrix, second, first) : element(matrix, first, second);
    }
    m[matrix] = halves[0] | halves[1] << 16;
  }
}
inline void load_matrices(uint32_t address, uint32_t (&m)[4]) { load_four_matrices<false>(address, m); }
inline void load_transposed_matrices(uint32_t address, uint32_t (&m)[4]) { load_four_matrices<true>(address, m); }

// m16n8k16 of 16-bit elements: a0, a1: row g, a2, a3: row g + 8, a4, a5: row g, a6, a7: row g + 8; column 2 t + (i &
// 1), of a4 and later 8 more. b0, b1: row 2 t + (i & 1), b2, b3: 8 more; column g. c0, c1: row g, c2, c3: row g + 8;
// column 2 t + (i & 1). m16n8k8 of TF32: a0: (g, t), a1: (g + 8, t), a2: (g, t + 4), a3: (g + 8, t + 4); b0: (t, g),
// b1: (t + 4, g); c as above. g: i / 4, t: i % 4.
//
// Sums are rounded towards zero, which the manual leaves open and tensor cores were seen to do.
inline float rounded_towards_zero(double sum) {
  const auto nearest = static_cast<float>(sum);
  return std::abs(nearest) > std::abs(sum) ? std::nextafter(nearest, 0.0f) : nearest;
}
template <class Element>
void multiply_add_matrices(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t own[] = {a[0], a[1], a[2], a[3], b0, b1};
  const char (*shown)[64] = emulation::show(own, sizeof(own));
  const auto word = [&](int lane, int i) {
    uint32_t bits;
    std::memcpy(&bits, shown[lane] + i * 4, sizeof(bits));
    return bits;
  };
  const int lane = static_cast<int>(emulation::thread_index.x % 32);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + (i >= 2 ? 8 : 0);
    const int column = lane % 4 * 2 + (i & 1);
    double sum = c[i];
    if constexpr (std::is_same_v<Element, float>) {
      for (int k = 0; k < 8; ++k) {
        const uint32_t left = word(row % 8 * 4 + k % 4, (row >= 8 ? 1 : 0) + (k >= 4 ? 2 : 0));
        const uint32_t right = word(column * 4 + k % 4, 4 + (k >= 4 ? 1 : 0));
        sum += static_cast<double>(float_from_bits(left & 0xffffe000u)) * float_from_bits(right & 0xffffe000u);
      }
    } else {
      for (int k = 0; k < 16; ++k) {
        const uint32_t left = word(row % 8 * 4 + k % 8 / 2, (row >= 8 ? 1 : 0) + (k >= 8 ? 2 : 0));
        const uint32_t right = word(column * 4 + k % 8 / 2, 4 + (k >= 8 ? 1 : 0));
        const auto half = [&](uint32_t bits) { return to_float(Element{static_cast<uint16_t>(bits >> k % 2 * 16)}); };
        sum += static_cast<double>(half(left)) * half(right);
      }
    }
    c[i] = rounded_towards_zero(sum);
  }
}

}  // namespace anabranch::cuda
