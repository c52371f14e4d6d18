// core/cuda/mma.cuh on the emulator, written from the fragment tables of the PTX manual and not from the project's
// code.
#pragma once

#include <cstdint>
#include <cstring>
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

// One lane's operands of mma, and the functions that multiply those of a warp (mma.cc).
struct Fragments {
  uint32_t a[4];
  uint32_t b[2];
  float c[4];
};
emulation::WarpFunction multiply_add_bfloat16;
emulation::WarpFunction multiply_add_float16;
emulation::WarpFunction multiply_add_tf32;

template <class Element>
void multiply_add_matrices(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const Fragments own{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  emulation::WarpFunction* const multiply_add = std::is_same_v<Element, float>      ? multiply_add_tf32
                                                : std::is_same_v<Element, BFloat16> ? multiply_add_bfloat16
                                                                                    : multiply_add_float16;
  std::memcpy(c, emulation::compute_in_warp(&own, sizeof(own), multiply_add), sizeof(c));
}

}  // namespace anabranch::cuda
