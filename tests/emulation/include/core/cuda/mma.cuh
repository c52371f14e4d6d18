// core/cuda/mma.cuh on the emulator, written from the fragment tables of the PTX manual and not from the project's
// code.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/cuda/shared.cuh"
#include "core/dtype.h"

namespace anabranch::cuda {

// ldmatrix. Lane i gets elements (i / 4, 2 (i % 4)) and (i / 4, 2 (i % 4) + 1) of each matrix, or of its transpose.
// Lanes 8 m to 8 m + 7 pass the row addresses of matrix m.
template <bool kTransposed>
void load_four_matrices(uint32_t address, uint32_t (&m)[4]) {
  const char (*addresses)[64] = emulation::publish(&address, sizeof(address));
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

// mma fragments of lane i, with g = i / 4 and t = i % 4, as (row, column):
//
//   m16n8k16, 16 bit   a0, a1  (g, 2 t + {0, 1})    a2, a3  (g + 8, 2 t + {0, 1})
//                      a4, a5  (g, 2 t + {8, 9})    a6, a7  (g + 8, 2 t + {8, 9})
//                      b0, b1  (2 t + {0, 1}, g)    b2, b3  (2 t + {8, 9}, g)
//   m16n8k8, TF32      a0 (g, t)   a1 (g + 8, t)   a2 (g, t + 4)   a3 (g + 8, t + 4)
//                      b0 (t, g)   b1 (t + 4, g)
//   both               c0, c1  (g, 2 t + {0, 1})    c2, c3  (g + 8, 2 t + {0, 1})
//
// Sums are rounded towards zero. The manual leaves the rounding open; tensor cores were observed to do this.
inline float rounded_towards_zero(double sum) {
  const auto nearest = static_cast<float>(sum);
  return std::abs(nearest) > std::abs(sum) ? std::nextafter(nearest, 0.0f) : nearest;
}
template <class Element>
void multiply_add_matrices(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t own[] = {a[0], a[1], a[2], a[3], b0, b1};
  const char (*published)[64] = emulation::publish(own, sizeof(own));
  const auto word = [&](int lane, int i) {
    uint32_t bits;
    std::memcpy(&bits, published[lane] + i * 4, sizeof(bits));
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
