// From operands in shared memory to accumulators in registers.
#pragma once

#include "core/cuda/keep.cuh"
#include "core/cuda/mma.cuh"
#include "core/cuda/shared.cuh"
#include "core/cuda/warp.cuh"
#include "experts/portable/shared_tile.h"

namespace anabranch::cuda::portable {

// The fragments of a warp's sides of an operand, from `side` on, as this lane loads them. Places in a k-block differ
// from the first one in bits of their own, which are flipped or added; so a lane keeps that one alone.
template <Major kMajor, class Element, int kSides>
class Fragments {
  using Tile = SharedTile<kMajor, sizeof(Element), kSides>;
  static constexpr bool kWordByWord = kMajor == Major::mn && sizeof(Element) == 4;

 public:
  struct A {};
  struct B {};
  __device__ Fragments(A, int side) {
    if constexpr (kWordByWord) {
      first_ = place(element_of_a(lane_index(), side, 0, 0));
    } else {
      first_ =
          place(kMajor == Major::k ? place_of_a_by_k(lane_index(), side, 0) : place_of_a_by_mn(lane_index(), side, 0));
    }
    keep(first_);
  }
  __device__ Fragments(B, int side) {
    if constexpr (kWordByWord) {
      first_ = place(element_of_b(lane_index(), side, 0, 0));
    } else {
      first_ =
          place(kMajor == Major::k ? place_of_b_by_k(lane_index(), side, 0) : place_of_b_by_mn(lane_index(), side, 0));
    }
    keep(first_);
  }

  // a[0 ... 3] of the n-th 16 rows of factor A; or b[0], b[1] of 8 columns of B, then of the next 8, of the n-th 16.
  __device__ __forceinline__ void load_a(uint32_t block, int n, int step, uint32_t (&a)[4]) const {
    if constexpr (kWordByWord) {
      load_words(block, n, step, {0, 1, 0, 1}, {0, 0, 4, 4}, a);
    } else {
      load(block, n, step, a);
    }
  }
  __device__ __forceinline__ void load_b(uint32_t block, int n, int step, uint32_t (&b)[4]) const {
    if constexpr (kWordByWord) {
      load_words(block, n, step, {0, 0, 1, 1}, {0, 4, 0, 4}, b);
    } else {
      load(block, n, step, b);
    }
  }

 private:
  static constexpr int kFlipBytes = 32;  // two chunks: a step of k, 16 sides of 16-bit elements or 8 of 32 bits

  __device__ static uint32_t place(const MatrixPlace& at) { return Tile::chunk(at.row, at.chunk); }
  __device__ static uint32_t place(const ElementPlace& at)
    requires(kMajor == Major::mn)
  {
    return Tile::element(at.k, at.side);
  }

  __device__ __forceinline__ void load(uint32_t block, int n, int step, uint32_t (&m)[4]) const {
    if constexpr (kMajor == Major::k) {
      const auto sides = static_cast<uint32_t>(n * kFragmentRows * kDepthBytes);
      load_matrices(((block + first_) ^ static_cast<uint32_t>(step * kFlipBytes)) + sides, m);
    } else {
      const auto steps = static_cast<uint32_t>(step * kStepBytes * kSides);
      load_transposed_matrices(((block + first_) ^ static_cast<uint32_t>(n * kFlipBytes)) + steps, m);
    }
  }

  // m[i]: sides[i] times 8 sides and k[i] of the step further.
  __device__ __forceinline__ void load_words(uint32_t block, int n, int step, const int (&sides)[4], const int (&k)[4],
                                             uint32_t (&m)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto flips = static_cast<uint32_t>((2 * n + sides[i]) * kFlipBytes);
      const auto steps = static_cast<uint32_t>((step * kStepBytes + k[i] * 4) * kSides);
      m[i] = load_shared<uint32_t>(((block + first_) ^ flips) + steps);
    }
  }

  uint32_t first_;
};

// A float32 number as the sum of two TF32 numbers and what they can't hold: at most 2^-23 of it. Tensor cores don't see
// the last 13 bits of `low`. Of a number that is none, `high` may be anything and `low` is none: sums are what they
// should be.
struct Split {
  uint32_t high;
  uint32_t low;
};
constexpr uint32_t kHalfOfTf32 = 0x1000u;  // half a unit in the last place
constexpr uint32_t kTf32 = 0xffffe000u;
AB_INLINE Split split(uint32_t bits) {
  const uint32_t high = (bits + kHalfOfTf32) & kTf32;
  return {high, bits_of(float_from_bits(bits) - float_from_bits(high))};
}
template <int kCount>
__device__ __forceinline__ void split(const uint32_t (&bits)[kCount], uint32_t (&high)[kCount],
                                      uint32_t (&low)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const Split parts = split(bits[i]);
    high[i] = parts.high;
    low[i] = parts.low;
  }
}

// Of TF32: tensor cores cut off the last 13 bits, 2^-10 of a number. A third of that is added before, so that a number
// becomes one at most two thirds of 2^-10 from it, on either side alike; TF32 numbers stay what they are, and what is
// not a number stays none.
AB_INLINE uint32_t rounded_to_tf32(uint32_t bits) {
  const float value = float_from_bits(bits);
  return bits_of(fmaf(value, 0x1.555556p-12f, value));
}
__device__ __forceinline__ void round_to_tf32(uint32_t (&bits)[4]) {
#pragma unroll
  for (uint32_t& each : bits) each = rounded_to_tf32(each);
}

// A warp's accumulators.
template <class Shape>
using Accumulators = float[Shape::kFragmentsDown][Shape::kFragmentsAcross][4];

// A warp's part of the product of two k-blocks. What it needs first is loaded as soon as the k-blocks are there, so
// that it arrives while something else is done.
template <class Shape, class Element, Precision kPrecision, Major kMajorA, Major kMajorB>
class WarpProduct {
  static constexpr bool kSplits = splits(sizeof(Element), kPrecision);
  static constexpr int kDown = Shape::kFragmentsDown;
  static constexpr int kPairs = Shape::kFragmentsAcross / 2;  // of fragments next to each other
  using FragmentsA = Fragments<kMajorA, Element, Shape::kRows>;
  using FragmentsB = Fragments<kMajorB, Element, kTileColumns>;

 public:
  // Of the rows from `row` and the columns from `column` of the tile on.
  __device__ WarpProduct(int row, int column)
      : a_(typename FragmentsA::A{}, row), b_(typename FragmentsB::B{}, column) {}

  // Loads what add() needs first of two k-blocks.
  __device__ __forceinline__ void load(uint32_t block_a, uint32_t block_b) {
    load_a(block_a, 0);
    if constexpr (kSplits) {
      load_pair(block_b, 0);
    } else {
      load_b(block_b, 0);
    }
  }
  // acc += their product.
  __device__ __forceinline__ void add(uint32_t block_a, uint32_t block_b, Accumulators<Shape>& acc) {
    if constexpr (kSplits) {
      add_split(block_a, block_b, acc);
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step > 0) {
          load_a(block_a, step);
          load_b(block_b, step);
        }
        add_step(acc);
      }
    }
  }

 private:
  __device__ __forceinline__ void load_a(uint32_t block, int step) {
#pragma unroll
    for (int i = 0; i < kDown; ++i) a_.load_a(block, i, step, left_[i]);
  }
  __device__ __forceinline__ void load_b(uint32_t block, int step) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) b_.load_b(block, j, step, right_[j]);
  }
  // The same pair of fragments of every step.
  __device__ __forceinline__ void load_pair(uint32_t block, int pair) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) b_.load_b(block, pair, step, right_[step]);
  }

  __device__ __forceinline__ void add_step(Accumulators<Shape>& acc) {
    if constexpr (sizeof(Element) == 4) {
#pragma unroll
      for (auto& fragment : left_) round_to_tf32(fragment);
#pragma unroll
      for (auto& fragment : right_) round_to_tf32(fragment);
    }
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kPairs; ++j) {
        multiply_add_matrices<Element>(acc[i][j], left_[i], right_[j / 2][j % 2 * 2], right_[j / 2][j % 2 * 2 + 1]);
      }
    }
  }

  // a b = a_high b_high + (a_high b_low + a_low b_high), the small terms first. Tensor cores round sums towards zero:
  // they sum the terms of a k-block, and the ordinary units, which round to nearest, add these sums up.
  __device__ __forceinline__ void add_split(uint32_t block_a, uint32_t block_b, Accumulators<Shape>& acc) {
    uint32_t a_high[kSteps][kDown][4];
    uint32_t a_low[kSteps][kDown][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step > 0) load_a(block_a, step);
#pragma unroll
      for (int i = 0; i < kDown; ++i) split(left_[i], a_high[step][i], a_low[step][i]);
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      if (j > 0) load_pair(block_b, j);
      uint32_t b_high[kSteps][4];
      uint32_t b_low[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) split(right_[step], b_high[step], b_low[step]);
      float sum[kDown][2][4] = {};
      const auto multiply = [&](const uint32_t (&a)[kSteps][kDown][4], const uint32_t (&b)[kSteps][4]) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int i = 0; i < kDown; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              multiply_add_matrices<Element>(sum[i][half], a[step][i], b[step][half * 2], b[step][half * 2 + 1]);
            }
          }
        }
      };
      multiply(a_low, b_high);
      multiply(a_high, b_low);
      multiply(a_high, b_high);
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int n = 0; n < 4; ++n) acc[i][2 * j + half][n] += sum[i][half][n];
        }
      }
    }
  }

  FragmentsA a_;
  FragmentsB b_;
  uint32_t left_[kDown][4];                       // of A: those of a step
  uint32_t right_[kSplits ? kSteps : kPairs][4];  // of B: those of a step, or a pair of every step
};

}  // namespace anabranch::cuda::portable
