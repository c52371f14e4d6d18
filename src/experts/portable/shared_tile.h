// Layouts of the k-blocks of operands in shared memory, and of the matrices of an MMA among the lanes of a warp. This
// is pure index arithmetic, which runs without a GPU.
//
// An operand has sides (the M or N dimension: rows or columns of the result) and k, the contracted dimension. An
// operand has the same major dimension in shared memory as in device memory:
//
//   Major::k    [side][64 bytes of k]     chunk c of side s is stored at chunk c ^ s / 2 % 4
//   Major::mn   [k][128 sides]            chunk c of k is stored at chunk c ^ k % 8; 32-bit elements: c ^ k % 4 * 2
//
// A chunk is 16 bytes. With these swizzles, 8 chunks that are read or written at a time cover 32 different banks.
#pragma once

#include <cstdint>

#include "core/inline.h"
#include "core/major.h"
#include "experts/portable/tile_shape.h"

namespace anabranch::cuda::portable {

constexpr int kChunkBytes = 16;
constexpr int kDepthChunks = kDepthBytes / kChunkBytes;
template <class Element>
constexpr int kChunk = kChunkBytes / static_cast<int>(sizeof(Element));  // elements

// kSides: rows or columns of the result. Addresses are byte offsets from the start of the k-block.
template <Major kMajor, int kElementBytes, int kSides>
struct SharedTile;

template <int kElementBytes, int kSides>
struct SharedTile<Major::k, kElementBytes, kSides> {
  static constexpr int kRowChunks = kDepthChunks;
  static constexpr int kRows = kSides;

  AB_INLINE static constexpr uint32_t chunk(int side, int c) {
    return static_cast<uint32_t>(side * kDepthBytes + ((c ^ (side / 2 % 4)) * kChunkBytes));
  }
};

template <int kElementBytes, int kSides>
struct SharedTile<Major::mn, kElementBytes, kSides> {
  static constexpr int kRowChunks = kSides * kElementBytes / kChunkBytes;
  static constexpr int kRows = kDepthBytes / kElementBytes;
  static_assert(kRowChunks % 8 == 0, "the swizzle permutes groups of 8 chunks");

  AB_INLINE static constexpr uint32_t chunk(int k, int c) {
    const int flips = kElementBytes == 2 ? k % 8 : k % 4 * 2;
    return static_cast<uint32_t>((k * kRowChunks + (c ^ flips)) * kChunkBytes);
  }
  AB_INLINE static constexpr uint32_t element(int k, int side) {
    constexpr int kEach = kChunkBytes / kElementBytes;
    return chunk(k, side / kEach) + static_cast<uint32_t>(side % kEach * kElementBytes);
  }
};

// How the threads of a CTA copy a k-block, kPasses chunks each: a thread copies the same chunk of every kRowStep-th row
// in memory, or every kChunkStep-th chunk of one row. The 8 chunks that a quarter warp writes cover 32 different banks.
template <class Tile, int kThreads>
struct CopyPlan;

template <int kElementBytes, int kSides, int kThreads>
struct CopyPlan<SharedTile<Major::k, kElementBytes, kSides>, kThreads> {
  using Tile = SharedTile<Major::k, kElementBytes, kSides>;
  static constexpr int kRowStep = kThreads / Tile::kRowChunks;
  static constexpr int kPasses = Tile::kRows / kRowStep;
  static_assert(kThreads % Tile::kRowChunks == 0 && Tile::kRows % kRowStep == 0 && kRowStep % 8 == 0,
                "a pass copies whole groups of 8 rows");

  AB_INLINE static constexpr int chunk(int thread, int /*pass*/) { return thread % Tile::kRowChunks; }
  AB_INLINE static constexpr int row(int thread, int pass) { return thread / Tile::kRowChunks + pass * kRowStep; }
};

template <int kElementBytes, int kSides, int kThreads>
struct CopyPlan<SharedTile<Major::mn, kElementBytes, kSides>, kThreads> {
  using Tile = SharedTile<Major::mn, kElementBytes, kSides>;
  static constexpr int kChunkStep = kThreads / Tile::kRows;
  static constexpr int kPasses = Tile::kRowChunks / kChunkStep;
  static_assert(kThreads % Tile::kRows == 0 && Tile::kRowChunks % (2 * kChunkStep) == 0 && Tile::kRows % 8 == 0,
                "a pass copies the same number of chunks of every row");

  AB_INLINE static constexpr int chunk(int thread, int pass) { return thread % kChunkStep + pass * kChunkStep; }
  AB_INLINE static constexpr int row(int thread, int /*pass*/) {
    const int row = thread / kChunkStep;
    // With 4 threads per row, take rows in the order 0 4 1 5 2 6 3 7: their chunks fall into different halves of a
    // row's 8 chunks.
    return kChunkStep == 4 ? row / 8 * 8 + row % 2 * 4 + row % 8 / 2 : row;
  }
};

// How the threads of a CTA copy and decode a k-block of packed weights in 16 bits. A piece is 16 packed bytes,
// kElements weights along a row in memory, which become kChunks chunks. A thread copies the piece to the place of its
// first chunk and later replaces it by the decoded chunks, which no other thread touches.
template <class Tile, int kElements, int kThreads>
struct PackedPlan;

template <int kSides, int kElements, int kThreads>
struct PackedPlan<SharedTile<Major::k, 2, kSides>, kElements, kThreads> {
  static constexpr int kRowElements = kDepthBytes / 2;  // of a k-block
  static constexpr int kRowPieces = kRowElements / kElements;
  static constexpr int kRowStep = kThreads / kRowPieces;
  static constexpr int kPieces = kSides / kRowStep;  // per thread
  static constexpr int kChunks = kElements * 2 / kChunkBytes;
  static_assert(kThreads % kRowPieces == 0 && kSides % kRowStep == 0, "each thread decodes as many pieces");

  AB_INLINE static constexpr int row(int thread, int i) { return thread / kRowPieces + i * kRowStep; }
  AB_INLINE static constexpr int piece(int thread, int /*i*/) { return thread % kRowPieces; }
};

// A quarter warp has one piece of 8 adjacent rows, whose chunks cover 32 banks; a warp has 4 adjacent pieces of them.
template <int kSides, int kElements, int kThreads>
struct PackedPlan<SharedTile<Major::mn, 2, kSides>, kElements, kThreads> {
  static constexpr int kRowElements = kSides;
  static constexpr int kRowPieces = kRowElements / kElements;
  static constexpr int kPieces = kRowPieces / 4;
  static constexpr int kChunks = kElements * 2 / kChunkBytes;
  static_assert(kRowPieces % 4 == 0 && kThreads / 32 * 8 == kDepthBytes / 2, "the warps share the rows of a k-block");

  AB_INLINE static constexpr int row(int thread, int /*i*/) { return thread / 32 * 8 + thread % 8; }
  AB_INLINE static constexpr int piece(int thread, int i) { return thread % 32 / 8 + i * 4; }
};

// Fragment layout for lane = 4 g + t, in 32-bit words (two 16-bit elements or one 32-bit element):
//
//   a[i]  row g + 8 (i % 2), words t + 4 (i / 2) of k
//   b[i]  column g, words t + 4 i of k
//   c[i]  row g + 8 (i / 2), column 2 t + i % 2
AB_INLINE constexpr int row_of_c(int lane, int i) { return lane / 4 + i / 2 * 8; }
AB_INLINE constexpr int column_of_c(int lane, int i) { return lane % 4 * 2 + i % 2; }

// The address that a lane passes to ldmatrix to load a[0 ... 3] of 16 sides from `side` on, or b[0], b[1] of 8 sides
// and b[0], b[1] of the next 8. It is a side and a chunk of k (Major::k), or a k and a chunk of sides (Major::mn,
// transposed).
struct MatrixPlace {
  int row;
  int chunk;
};
AB_INLINE constexpr MatrixPlace place_of_a_by_k(int lane, int side, int step) {
  return {side + lane % 16, step * 2 + lane / 16};
}
AB_INLINE constexpr MatrixPlace place_of_b_by_k(int lane, int side, int step) {
  return {side + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2};
}
AB_INLINE constexpr MatrixPlace place_of_a_by_mn(int lane, int side, int step) {
  return {step * 16 + lane % 8 + lane / 16 * 8, side / 8 + lane / 8 % 2};
}
AB_INLINE constexpr MatrixPlace place_of_b_by_mn(int lane, int side, int step) {
  return {step * 16 + lane % 16, side / 8 + lane / 16};
}

// ldmatrix cannot transpose 32-bit MN-major elements. Instead a lane reads four adjacent sides of each of its words of
// k, one for each of four fragments. These fragments hold the sides in a permuted order.
template <Major kMajor, int kElementBytes>
constexpr bool kByFours = kMajor == Major::mn && kElementBytes == 4;

// The side of a warp that is stored at a place, 0 ... 7, of its n-th 8 sides: row g of a, column g of b, row or column
// of c.
template <bool kFours>
AB_INLINE constexpr int side_at(int n, int place) {
  return kFours ? n / 4 * 32 + place * 4 + n % 4 : n * 8 + place;
}
// The first word of k of four fragments, and one chunk of sides for all four. The second word is 4 k further; the next
// four fragments are kFoursBytes further.
AB_INLINE constexpr MatrixPlace place_of_fours(int lane, int side, int step) {
  return {step * 8 + lane % 4, side / 4 + lane / 4};
}
constexpr int kFoursBytes = 4 * 8 * 4;

// Accumulators staged in shared memory for the epilogue, in place of the operands: rows of 128 float32 values plus
// unused padding, so that lanes of different rows write pairs or fours of values to different banks.
template <class Shape>
constexpr int kStagedRows = Shape::kWarpRows * kFragmentRows;  // at a time: one fragment row per warp
template <class Shape>
constexpr uint32_t kStagedBytes = static_cast<uint32_t>(kStagedRows<Shape> * (kTileColumns + 8)) * 4;

template <class Shape_, bool kFoursA, bool kFoursB>
struct Staging {
  using Shape = Shape_;
  static constexpr int kRowBytes = (kTileColumns + (kFoursB ? 4 : 8)) * 4;

  AB_INLINE static constexpr uint32_t place(int row, int column) {
    return static_cast<uint32_t>(row * kRowBytes + column * 4);
  }
  // The row of the tile that a staged row of the part-th fragments belongs to.
  AB_INLINE static constexpr int row_of_tile(int row, int part) {
    return row / kFragmentRows * Shape::kRowsOfWarp + side_at<kFoursA>(2 * part + row % kFragmentRows / 8, row % 8);
  }
};

}  // namespace anabranch::cuda::portable
