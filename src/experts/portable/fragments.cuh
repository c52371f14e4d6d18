// From operands in shared memory to accumulators in registers.
#pragma once

#include "core/cuda/mma.cuh"
#include "core/cuda/shared.cuh"
#include "core/cuda/warp.cuh"
#include "experts/portable/shared_tile.h"

namespace anabranch::cuda::portable {

// a[0 ... 3] of 16 rows from `side` on.
template <Major kMajor, class Element, int kSides>
__device__ __forceinline__ void load_a(uint32_t block, int side, int step, uint32_t (&a)[4]) {
  using Tile = SharedTile<kMajor, sizeof(Element), kSides>;
  if constexpr (kMajor == Major::k) {
    const MatrixPlace place = place_of_a_by_k(lane_index(), side, step);
    load_matrices(block + Tile::chunk(place.row, place.chunk), a);
  } else if constexpr (sizeof(Element) == 2) {
    const MatrixPlace place = place_of_a_by_mn(lane_index(), side, step);
    load_transposed_matrices(block + Tile::chunk(place.row, place.chunk), a);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const ElementPlace place = element_of_a(lane_index(), side, step, i);
      a[i] = load_shared<uint32_t>(block + Tile::element(place.k, place.side));
    }
  }
}

// b[0], b[1] of 8 columns from `side` on, then of the next 8.
template <Major kMajor, class Element, int kSides>
__device__ __forceinline__ void load_b(uint32_t block, int side, int step, uint32_t (&b)[4]) {
  using Tile = SharedTile<kMajor, sizeof(Element), kSides>;
  if constexpr (kMajor == Major::k) {
    const MatrixPlace place = place_of_b_by_k(lane_index(), side, step);
    load_matrices(block + Tile::chunk(place.row, place.chunk), b);
  } else if constexpr (sizeof(Element) == 2) {
    const MatrixPlace place = place_of_b_by_mn(lane_index(), side, step);
    load_transposed_matrices(block + Tile::chunk(place.row, place.chunk), b);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const ElementPlace place = element_of_b(lane_index(), side + i / 2 * kFragmentColumns, step, i % 2);
      b[i] = load_shared<uint32_t>(block + Tile::element(place.k, place.side));
    }
  }
}

// A float32 number as the sum of two TF32 numbers and what they can't hold: at most 2^-23 of it. Tensor cores don't see the
// last 13 bits of `low`. Of a number that is none, `high` may be anything and `low` is none: sums are what they should be.
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

// A warp's accumulators.
template <class Shape>
using Accumulators = float[Shape::kFragmentsDown][Shape::kFragmentsAcross][4];

// acc += the products of one step of a k-block, for the warp's rows from `row` and columns from `column` of the tile
// on.
template <class Shape, class Element, Major kMajorA, Major kMajorB>
  requires(sizeof(Element) == 2)
__device__ __forceinline__ void multiply_step(uint32_t block_a, uint32_t block_b, int row, int column, int step,
                                              Accumulators<Shape>& acc) {
  uint32_t a[Shape::kFragmentsDown][4];
  uint32_t b[Shape::kFragmentsAcross / 2][4];
#pragma unroll
  for (int i = 0; i < Shape::kFragmentsDown; ++i) {
    load_a<kMajorA, Element, Shape::kRows>(block_a, row + i * kFragmentRows, step, a[i]);
  }
#pragma unroll
  for (int j = 0; j < Shape::kFragmentsAcross / 2; ++j) {
    load_b<kMajorB, Element, kTileColumns>(block_b, column + j * 2 * kFragmentColumns, step, b[j]);
  }
#pragma unroll
  for (int i = 0; i < Shape::kFragmentsDown; ++i) {
#pragma unroll
    for (int j = 0; j < Shape::kFragmentsAcross; ++j) {
      multiply_add_matrices<Element>(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

// Of float32: a b = a_high b_high + (a_high b_low + a_low b_high), the small terms first. Tensor cores round sums
// towards zero: they sum few terms, and the ordinary units, which round to nearest, add these sums up.
template <class Shape, class Element, Major kMajorA, Major kMajorB>
  requires(sizeof(Element) == 4)
__device__ __forceinline__ void multiply_step(uint32_t block_a, uint32_t block_b, int row, int column, int step,
                                              Accumulators<Shape>& acc) {
  uint32_t a_high[Shape::kFragmentsDown][4];
  uint32_t a_low[Shape::kFragmentsDown][4];
#pragma unroll
  for (int i = 0; i < Shape::kFragmentsDown; ++i) {
    uint32_t a[4];
    load_a<kMajorA, Element, Shape::kRows>(block_a, row + i * kFragmentRows, step, a);
    split(a, a_high[i], a_low[i]);
  }
#pragma unroll
  for (int j = 0; j < Shape::kFragmentsAcross; j += 2) {
    uint32_t b[4];
    uint32_t b_high[4];
    uint32_t b_low[4];
    load_b<kMajorB, Element, kTileColumns>(block_b, column + j * kFragmentColumns, step, b);
    split(b, b_high, b_low);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < Shape::kFragmentsDown; ++i) {
        float sum[4] = {};
        multiply_add_matrices<Element>(sum, a_low[i], b_high[half * 2], b_high[half * 2 + 1]);
        multiply_add_matrices<Element>(sum, a_high[i], b_low[half * 2], b_low[half * 2 + 1]);
        multiply_add_matrices<Element>(sum, a_high[i], b_high[half * 2], b_high[half * 2 + 1]);
#pragma unroll
        for (int n = 0; n < 4; ++n) acc[i][j + half][n] += sum[n];
      }
    }
  }
}

// Of a whole k-block.
template <class Shape, class Element, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void multiply_k_block(uint32_t block_a, uint32_t block_b, int row, int column,
                                                 Accumulators<Shape>& acc) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    multiply_step<Shape, Element, kMajorA, kMajorB>(block_a, block_b, row, column, step, acc);
  }
}

}  // namespace anabranch::cuda::portable
