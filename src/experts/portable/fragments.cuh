// Loads operands from shared memory into MMA fragments, and multiplies them into accumulators.
#pragma once

#include "core/cuda/keep.cuh"
#include "core/cuda/mma.cuh"
#include "core/cuda/shared.cuh"
#include "core/cuda/warp.cuh"
#include "experts/portable/shared_tile.h"

namespace anabranch::cuda::portable {

// The fragments of one warp's sides (rows of A or columns of B) from `side` on, as this lane loads them. Addresses in a
// k-block differ from the first one in separate bits, which are flipped or added, so a lane stores only the first
// address.
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

  // Loads a[0 ... 3] for each 16 rows of operand A.
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
  // Loads b[0] and b[1] for 4 x 8 columns of operand B: the n-th 32 columns.
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
  static constexpr int kFlipBytes = 32;  // two chunks: one step of k, or 16 sides of 16-bit elements

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

  // Loads the first or second words of k for the n-th 4 x 8 sides.
  __device__ __forceinline__ uint4 load_fours(uint32_t block, int n, int step, int word) const {
    const auto steps = static_cast<uint32_t>((step * 8 + word * 4) * kSides * 4);
    return load_shared<uint4>(block + first_ + static_cast<uint32_t>(n * kFoursBytes) + steps);
  }

  uint32_t first_;
};

// Splits a float32 number into the sum of two TF32 numbers, up to a relative error of 2^-23. Tensor cores ignore the
// last 13 bits of `low`. For NaN, `high` may be anything but `low` is NaN, so sums stay NaN.
struct Split {
  uint32_t high;
  uint32_t low;
};
constexpr uint32_t kHalfOfTf32 = 0x1000u;  // half a unit in the last place of TF32
constexpr uint32_t kTf32 = 0xffffe000u;
AB_INLINE Split split(uint32_t bits) {
  const uint32_t high = (bits + kHalfOfTf32) & kTf32;
  return {high, bits_of(float_from_bits(bits) - float_from_bits(high))};
}
// Rounds to TF32. Tensor cores truncate the last 13 bits, up to 2^-10 of a number. Adding a third of that beforehand
// centres the error at 2/3 of 2^-10 in either direction. TF32 numbers stay unchanged, and NaN stays NaN.
AB_INLINE uint32_t rounded_to_tf32(uint32_t bits) {
  const float value = float_from_bits(bits);
  return bits_of(fmaf(value, 0x1.555556p-12f, value));
}
// Accumulators of one warp.
template <class Shape>
using Accumulators = float[Shape::kFragmentsDown][Shape::kFragmentsAcross][4];

// Fragments of operands as the instructions read them: unchanged, rounded to TF32, or split in two.
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

// Multiplies one warp's share of two k-blocks. Loads overlap with MMA: each operand is loaded while the one before it
// is multiplied, and the first operands of the next k-blocks before the last MMAs of the current ones.
template <class Shape, class Element, Precision kPrecision, Major kMajorA, Major kMajorB>
class WarpProduct {
  static constexpr bool kSplits = splits(sizeof(Element), kPrecision);
  static constexpr int kDown = Shape::kFragmentsDown;
  static constexpr int kFours = Shape::kFragmentsAcross / 4;
  using OperandsA = Operands<Element, kPrecision, kDown, 4>;
  using OperandsB = Operands<Element, kPrecision, 4, 2>;

 public:
  // Covers the tile's rows from `row` on and its columns from `column` on.
  __device__ WarpProduct(int row, int column)
      : a_(typename decltype(a_)::A{}, row), b_(typename decltype(b_)::B{}, column) {}

  // Loads the first operands that add() needs of two k-blocks.
  __device__ __forceinline__ void load(uint32_t block_a, uint32_t block_b) {
    a_.load_a(block_a, 0, left_);
    b_.load_b(block_b, 0, 0, right_);
  }

  // acc += A B, except for sums that finish() adds. Calls advance() once the warp holds all operands it still needs in
  // registers; advance() loads the first operands of the next k-blocks.
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

  // Tensor cores round sums towards zero. They therefore sum the terms of a few k-blocks only; ordinary additions,
  // which round to nearest, accumulate these sums.
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
        // a b = a_high b_high + (a_high b_low + a_low b_high), small terms first.
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
  uint32_t left_[kDown][4];  // next fragments of A
  uint32_t right_[4][2];     // next fragments of B
  Accumulators<Shape> sum_ = {};
  int summed_ = 0;
};

}  // namespace anabranch::cuda::portable
