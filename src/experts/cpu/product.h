// GEMMs of tiles. Operands that the GEMM cannot read in place are gathered and converted block by block into per-thread
// memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "core/tensor.h"
#include "core/workspace.h"
#include "experts/cpu/kernels.h"

namespace anabranch {

constexpr int64_t kTileColumns = 512;
constexpr int64_t kTileDepth = 512;  // terms of a sum per block; twice as many for native bfloat16

// Rows of a tensor, `stride` elements apart, starting at element `offset`. rows: gather indices.
Matrix matrix_of(const ab_tensor* tensor, int64_t offset, int64_t stride, const int32_t* rows = nullptr);

// Quantised rows, each with its own scales. `tensor` nullptr: no rows. If it has three axes, the last two are merged.
Matrix quantized_matrix(const ab_tensor* tensor, const ab_tensor* scales, int64_t columns);

// Returns the submatrix that begins at (row, column). Both must be block boundaries if the matrix is quantised.
Matrix at(const Matrix& m, int64_t row, int64_t column);

// op(B) [k, n] of a GEMM and its result C: float32, or another dtype if Products::can_write() allows it.
struct RightHandSide {
  Matrix b;
  Matrix c;
  bool adds = false;  // add to C, which must be float32 then
};

// Bytes per thread for a block of packed weights that a GEMM reads as op(B) [k, n] in tiles of columns. transposed: B
// is stored as [n, k].
int64_t packed_block_bytes(const ab_tensor* weights, bool transposed, int64_t n, int64_t k);

class Products {
 public:
  // Takes per-thread memory from the workspace: for blocks of op(A) with at most kTileRows rows, for blocks of op(B)
  // with at most kTileColumns columns, and for a tile of results. `rows` bounds the rows of a tile that is no weight
  // gradient, and the terms of a weight gradient. `max_width` bounds all other dimensions.
  // packed_bytes: for blocks of packed operands B, see packed_block_bytes().
  Products(Workspace& workspace, int threads, int64_t rows, int64_t max_width, int64_t tile_columns,
           int64_t packed_bytes = 0);

  const ExpertKernels& kernels() const { return kernels_; }

  // A thread's tile of results, with tile_columns columns.
  float* tile(int thread) const;

  // c (+)= op(A) op(B) for each right-hand side, with k terms per sum. If A is not transposed, c must have space for m
  // rounded up to kRowPadding rows; A's rows after the first m are read if there are `readable_rows`.
  void multiply(int thread, const Matrix& a, bool transpose_a, std::span<const RightHandSide> right_hand_sides,
                bool transpose_b, int64_t m, int64_t n, int64_t k, int64_t readable_rows = 0);

  // Whether a GEMM of a and b with k terms can write `dtype` directly.
  static bool can_write(int32_t dtype, const Matrix& a, const Matrix& b, int64_t k);

  // Returns AB_UNSUPPORTED if GEMMs of these dtypes would need instructions that were requested but are not available.
  static ab_status check(int32_t a_dtype, int32_t b_dtype);

  // Returns an error if a GEMM has failed.
  ab_status status() const;

 private:
  Matrix prepare(const Matrix& m, bool bf16, int64_t rows, int64_t padded_rows, int64_t columns, char* to,
                 bool copy) const;
  Matrix unpack(const Matrix& m, bool bf16, int64_t rows, int64_t padded_rows, int64_t columns, char* to,
                bool copy) const;

  const ExpertKernels& kernels_;
  int64_t a_bytes_;
  int64_t b_bytes_;
  int64_t c_bytes_;
  char* memory_;
  std::atomic<int> failure_{0};  // oneDNN's status of a failed GEMM; 0: none
};

}  // namespace anabranch
