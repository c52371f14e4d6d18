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
  static constexpr bool kFours = kByFours<kMajor, sizeof(Element)>;

 public:
  struct A {};
  struct B {};
  __device__ Fragments(A, int side) {
    if constexpr (kFours) {
      first_ = place(place_of_fours(lane_index(), side, 0));
    } else {
      first_ =
          place(kMajor == Major::k ? place_of_a_by_k(lane_index(), side, 0) : place_of_a_by_mn(lane_index(), side, 0));
    }
    keep(first_);
  }
  __device__ Fragments(B, int side) {
    if constexpr (kFours) {
      first_ = place(place_of_fours(lane_index(), side, 0));
    } else {
      first_ =
          place(kMajor == Major::k ? place_of_b_by_k(lane_index(), side, 0) : place_of_b_by_mn(lane_index(), side, 0));
    }
    keep(first_);
  }

  // a[0 ... 3] of every 16 rows of operand A.
  template <int kCount>
  __device__ __forceinline__ void load_a(uint32_t block, int step, uint32_t (&a)[kCount][4]) const {
    if constexpr (kFours) {
      static_assert(kCount % 2 == 0, "one load fills the fragments of 32 rows");
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const uint4 first = load_fours(block, i / 2, step, 0);
        const uint4 second = load_fours(block, i / 2, step, 1);
        set(a[i], first.x, first.y, second.x, second.y);
        set(a[i + 1], first.z, first.w, second.z, second.w);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) load(block, i, step, a[i]);
    }
  }
  // b[0], b[1] of 8 columns of operand B each, of the n-th 32.
  __device__ __forceinline__ void load_b(uint32_t block, int n, int step, uint32_t (&b)[4][2]) const {
    if constexpr (kFours) {
      const uint4 first = load_fours(block, n, step, 0);
      const uint4 second = load_fours(block, n, step, 1);
      set(b[0], first.x, second.x);
      set(b[1], first.y, second.y);
      set(b[2], first.z, second.z);
      set(b[3], first.w, second.w);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t m[4];
        load(block, n * 2 + i, step, m);
        set(b[i * 2], m[0], m[1]);
        set(b[i * 2 + 1], m[2], m[3]);
      }
    }
  }

 private:
  static constexpr int kFlipBytes = 32;  // two chunks: a step of k, or 16 sides of 16-bit elements

  __device__ static uint32_t place(const MatrixPlace& at) { return Tile::chunk(at.row, at.chunk); }

  template <int kCount, class... Words>
  __device__ static __forceinline__ void set(uint32_t (&to)[kCount], Words... words) {
    static_assert(sizeof...(Words) == kCount, "one word per register");
    int i = 0;
    ((to[i++] = words), ...);
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

  // The first or second words of k of the n-th 4 times 8 sides.
  __device__ __forceinline__ uint4 load_fours(uint32_t block, int n, int step, int word) const {
    const auto steps = static_cast<uint32_t>((step * 8 + word * 4) * kSides * 4);
    return load_shared<uint4>(block + first_ + static_cast<uint32_t>(n * kFoursBytes) + steps);
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
// Of TF32: tensor cores cut off the last 13 bits, 2^-10 of a number. A third of that is added before, so that a number
// becomes one at most two thirds of 2^-10 from it, on either side alike; TF32 numbers stay what they are, and what is
// not a number stays none.
AB_INLINE uint32_t rounded_to_tf32(uint32_t bits) {
  const float value = float_from_bits(bits);
  return bits_of(fmaf(value, 0x1.555556p-12f, value));
}
// A warp's accumulators.
template <class Shape>
using Accumulators = float[Shape::kFragmentsDown][Shape::kFragmentsAcross][4];

// Operands as instructions take them: as they are, rounded, or in two parts.
template <class Element, Precision kPrecision, int kRows, int kColumns>
struct Operands {
  static constexpr bool kSplits = splits(sizeof(Element), kPrecision);
  uint32_t high[kRows][kColumns];
  uint32_t low[kSplits ? kRows : 1][kColumns];

  __device__ __forceinline__ explicit Operands(const uint32_t (&bits)[kRows][kColumns]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if constexpr (kSplits) {
          const Split parts = split(bits[i][j]);
          high[i][j] = parts.high;
          low[i][j] = parts.low;
        } else {
          high[i][j] = sizeof(Element) == 4 ? rounded_to_tf32(bits[i][j]) : bits[i][j];
        }
      }
    }
  }
};

// A warp's part of the product of two k-blocks. What is needed next is loaded while something else is multiplied: what
// is needed first of two k-blocks, before the last products of the ones before.
template <class Shape, class Element, Precision kPrecision, Major kMajorA, Major kMajorB>
class WarpProduct {
  static constexpr bool kSplits = splits(sizeof(Element), kPrecision);
  static constexpr int kDown = Shape::kFragmentsDown;
  static constexpr int kFours = Shape::kFragmentsAcross / 4;
  using OperandsA = Operands<Element, kPrecision, kDown, 4>;
  using OperandsB = Operands<Element, kPrecision, 4, 2>;

 public:
  // Of the rows from `row` and the columns from `column` of the tile on.
  __device__ WarpProduct(int row, int column)
      : a_(typename decltype(a_)::A{}, row), b_(typename decltype(b_)::B{}, column) {}

  // Loads what add() needs first of two k-blocks.
  __device__ __forceinline__ void load(uint32_t block_a, uint32_t block_b) {
    a_.load_a(block_a, 0, left_);
    b_.load_b(block_b, 0, 0, right_);
  }

  // acc += their product, up to what finish() adds. advance(): called when nothing of them is needed any more but what
  // the warp has in registers, to load what is needed first of the next ones.
  template <class Advance>
  __device__ __forceinline__ void add(uint32_t block_a, uint32_t block_b, Accumulators<Shape>& acc,
                                      const Advance& advance) {
    if constexpr (kSplits) {
      multiply(block_a, block_b, sum_, advance);
      if (++summed_ == kBlocksOfSum) finish(acc);
    } else {
      multiply(block_a, block_b, acc, advance);
    }
  }

  // Tensor cores round sums towards zero: they sum some k-blocks' terms, and the ordinary units, which round to
  // nearest, add these sums up.
  __device__ __forceinline__ void finish(Accumulators<Shape>& acc) {
    if constexpr (kSplits) {
      summed_ = 0;
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < Shape::kFragmentsAcross; ++j) {
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            acc[i][j][n] += sum_[i][j][n];
            sum_[i][j][n] = 0.0f;
          }
        }
      }
    }
  }

 private:
  static constexpr int kBlocksOfSum = 2;  // 32 terms

  template <class Advance>
  __device__ __forceinline__ void multiply(uint32_t block_a, uint32_t block_b, Accumulators<Shape>& sums,
                                           const Advance& advance) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const OperandsA a(left_);
      if (step + 1 < kSteps) a_.load_a(block_a, step + 1, left_);
#pragma unroll
      for (int n = 0; n < kFours; ++n) {
        const OperandsB b(right_);
        if (n + 1 < kFours) {
          b_.load_b(block_b, n + 1, step, right_);
        } else if (step + 1 < kSteps) {
          b_.load_b(block_b, 0, step + 1, right_);
        } else {
          advance();
        }
        // a b = a_high b_high + (a_high b_low + a_low b_high), the small terms first.
        if constexpr (kSplits) {
          multiply(a.low, b.high, n, sums);
          multiply(a.high, b.low, n, sums);
        }
        multiply(a.high, b.high, n, sums);
      }
    }
  }
  __device__ __forceinline__ void multiply(const uint32_t (&a)[kDown][4], const uint32_t (&b)[4][2], int n,
                                           Accumulators<Shape>& sums) {
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply_add_matrices<Element>(sums[i][n * 4 + j], a[i], b[j][0], b[j][1]);
    }
  }

  Fragments<kMajorA, Element, Shape::kRows> a_;
  Fragments<kMajorB, Element, kTileColumns> b_;
  uint32_t left_[kDown][4];  // of A: what is needed next
  uint32_t right_[4][2];     // of B
  Accumulators<Shape> sum_ = {};
  int summed_ = 0;
};

}  // namespace anabranch::cuda::portable
