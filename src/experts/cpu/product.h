// Products of tiles. Where operands do not already stand as the matrix product wants them, they are gathered and
// converted block by block into a thread's own memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "core/tensor.h"
#include "core/workspace.h"
#include "experts/cpu/kernels.h"

namespace anabranch {

constexpr int64_t kTileColumns = 512;
constexpr int64_t kTileDepth = 512;  // terms of a sum in one block; twice as many where bfloat16 is not converted

// Rows of a tensor, `stride` elements apart from `offset` on; rows: gathered.
Matrix matrix_of(const ab_tensor* tensor, int64_t offset, int64_t stride, const int32_t* rows = nullptr);

// Quantised rows, each with its own scales; `tensor` nullptr: nothing. With three axes the last two are one.
Matrix quantized_matrix(const ab_tensor* tensor, const ab_tensor* scales, int64_t columns);

// The same matrix from (row, column) on; of a quantised one, where a block begins.
Matrix at(const Matrix& m, int64_t row, int64_t column);

// op(B) [k, n] of a product and where it goes: C float32, or of another dtype where Products::can_write says so.
struct RightHandSide {
  Matrix b;
  Matrix c;
  bool adds = false;  // to what stands in C, float32
};

class Products {
 public:
  // Takes the memory of each thread off the workspace: for blocks of op(A), at most kTileRows high, and of op(B), at
  // most kTileColumns wide and of no dimension above `widest`, and for a tile of results.
  Products(Workspace& workspace, int threads, int64_t widest, int64_t tile_columns);

  const ExpertKernels& kernels() const { return kernels_; }

  // Tile of results of a thread, [kTileRows, tile_columns].
  float* tile(int thread) const;

  // c (+)= op(A) op(B) for each right-hand side; the sum has k terms. If A is not transposed, c needs room for m
  // rounded up to kRowPadding rows, and rows below the m of A are read where there are `readable_rows`.
  void multiply(int thread, const Matrix& a, bool transpose_a, std::span<const RightHandSide> right_hand_sides,
                bool transpose_b, int64_t m, int64_t n, int64_t k, int64_t readable_rows = 0);

  // Whether a product of k terms of a and b can be rounded to `dtype` where it is computed.
  static bool can_write(int32_t dtype, const Matrix& a, const Matrix& b, int64_t k);

  // Unsupported where products of these two dtypes would need instructions that were asked for and are not there.
  static ab_status check(int32_t a_dtype, int32_t b_dtype);

  // An error if a product has failed.
  ab_status status() const;

 private:
  Matrix ready(const Matrix& m, bool bf16, int64_t rows, int64_t padded_rows, int64_t columns, char* to,
               bool copy) const;

  const ExpertKernels& kernels_;
  int64_t a_bytes_;
  int64_t b_bytes_;
  int64_t c_bytes_;
  char* memory_;
  std::atomic<int> failure_{0};  // oneDNN's status of a product that failed
};

}  // namespace anabranch
