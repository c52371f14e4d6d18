// The arithmetic of mma on the emulator.
//
// Fragments of lane i, with g = i / 4 and t = i % 4, as (row, column):
//
//   m16n8k16, 16 bit   a0, a1  (g, 2 t + {0, 1})    a2, a3  (g + 8, 2 t + {0, 1})
//                      a4, a5  (g, 2 t + {8, 9})    a6, a7  (g + 8, 2 t + {8, 9})
//                      b0, b1  (2 t + {0, 1}, g)    b2, b3  (2 t + {8, 9}, g)
//   m16n8k8, TF32      a0 (g, t)   a1 (g + 8, t)   a2 (g, t + 4)   a3 (g + 8, t + 4)
//                      b0 (t, g)   b1 (t + 4, g)
//   both               c0, c1  (g, 2 t + {0, 1})    c2, c3  (g + 8, 2 t + {0, 1})
#include "core/cuda/mma.cuh"

#include <cmath>

namespace anabranch::cuda {
namespace {

constexpr int kLanes = 32;

// Sums are rounded towards zero. The manual leaves the rounding open; tensor cores were observed to do this.
float rounded_towards_zero(double sum) {
  const auto nearest = static_cast<float>(sum);
  return std::abs(nearest) > std::abs(sum) ? std::nextafter(nearest, 0.0f) : nearest;
}

// kPerWord: elements per 32-bit word. element(word, i): the i-th one.
template <int kPerWord, class Element>
void multiply_add(const char (*published)[64], char (*results)[64], const Element& element) {
  constexpr int kDepth = 8 * kPerWord;
  double a[16][kDepth];
  double b[kDepth][8];
  double c[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    Fragments own;
    std::memcpy(&own, published[lane], sizeof(own));
    const int g = lane / 4;
    const int t = lane % 4;
    for (int i = 0; i < kPerWord; ++i) {
      const int k = t * kPerWord + i;
      for (int w = 0; w < 4; ++w) a[g + w % 2 * 8][k + w / 2 * (kDepth / 2)] = element(own.a[w], i);
      for (int w = 0; w < 2; ++w) b[k + w * (kDepth / 2)][g] = element(own.b[w], i);
    }
    for (int i = 0; i < 4; ++i) c[g + i / 2 * 8][2 * t + i % 2] = own.c[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kDepth; ++k) {
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    float own[4];
    for (int i = 0; i < 4; ++i) own[i] = rounded_towards_zero(c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    std::memcpy(results[lane], own, sizeof(own));
  }
}

}  // namespace

void multiply_add_bfloat16(const char (*published)[64], char (*results)[64]) {
  multiply_add<2>(published, results,
                  [](uint32_t word, int i) { return to_float(BFloat16{static_cast<uint16_t>(word >> i * 16)}); });
}

void multiply_add_float16(const char (*published)[64], char (*results)[64]) {
  multiply_add<2>(published, results,
                  [](uint32_t word, int i) { return to_float(Float16{static_cast<uint16_t>(word >> i * 16)}); });
}

void multiply_add_tf32(const char (*published)[64], char (*results)[64]) {
  multiply_add<1>(published, results, [](uint32_t word, int) { return float_from_bits(word & 0xffffe000u); });
}

}  // namespace anabranch::cuda
