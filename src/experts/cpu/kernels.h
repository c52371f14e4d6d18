// Kernels that run on a tile before and after its GEMM, one set per instruction set.
#pragma once

#include <cstdint>

#include "core/isa.h"
#include "experts/activation.h"

namespace anabranch {

// Scales of an e4m3 matrix: one per 128 columns of each row (block_rows = 1), or of 128 rows.
struct BlockScales {
  float* data = nullptr;
  int64_t row_stride = 0;  // from one row of blocks to the next
  int64_t column_stride = 0;
  int64_t block_rows = 1;
};

// Scales and position of a submatrix of packed weights. Matrix::data stays that of the whole matrix, because a
// submatrix may begin inside a block.
struct PackedBlocks {
  const void* scales = nullptr;  // of the matrix: one byte per 32 elements of MXFP4, one float per FP8 block
  int64_t row = 0;               // where the submatrix begins
  int64_t column = 0;
  int32_t dtype = 0;  // the values are rounded to it; 0: the matrix is not packed
};

// Rows of a stored matrix; a tile uses their first columns. Row i is row rows[i], or zeros if rows[i] is negative. rows
// == nullptr: row i itself.
struct Matrix {
  void* data;
  int32_t dtype;
  int64_t stride;  // elements from one row to the next
  const int32_t* rows;
  BlockScales scales = {};
  PackedBlocks packed = {};

  bool is_packed() const { return packed.dtype != 0; }
  int32_t value_dtype() const { return is_packed() ? packed.dtype : dtype; }
};

// Destination of e4m3 rows with one scale per 128 columns. data nullptr: none.
struct QuantizedRows {
  Matrix q;
  bool power_of_two;
};

// A tile of float32 results. Rows with a negative token are padding; tokens == nullptr: no padding.
struct ResultTile {
  const float* data;
  int64_t stride;
  int64_t rows;
  int64_t columns;
  const int32_t* tokens;
};

// Column order of intermediate rows: gate before up, or interleaved.
struct GateUpOrder {
  bool gated;
  bool interleaved;

  int64_t step() const { return interleaved ? 2 : 1; }  // from one column of a part to the next
};

struct ExpertKernels {
  // to[i, :] = row i of `from` as float32, times its scales, for i < rows; zero for rows <= i < padded_rows. For e4m3,
  // `from` must begin at a block and consist of whole blocks of columns.
  void (*load)(const Matrix& from, int64_t rows, int64_t padded_rows, int64_t columns, float* to);

  // y = scale tile + bias_scale bias, rounded to y's dtype; zero in padding rows. bias [columns]; scales [rows], or
  // nullptr (1).
  void (*store)(const ResultTile& tile, const float* scale, const float* bias, const float* bias_scale,
                const Matrix& y);

  // tile holds h; for gated experts, `columns` columns each of gate and up, in the order `tile_order`. So does bias, or
  // it is nullptr.
  //   h += bias;  a = scale phi(h_gate, h_up);  zero in padding rows.
  // h[0], h[1]: destinations of gate and up from their first columns on, in the order `order`. data nullptr: h or `a`
  // is not requested; `a` still has the dtype of h. a_q is quantised from float32; its columns are whole blocks.
  void (*intermediate)(const Activation& activation, const GateUpOrder& order, const GateUpOrder& tile_order,
                       const ResultTile& tile, const float* bias, const float* scale, const Matrix (&h)[2],
                       const Matrix& a, const QuantizedRows& a_q);

  // tile holds da'. h[0] and h[1] start at the first columns of gate and up; dh[0] and dh[1] receive their gradients
  // and may alias h.
  //   dot += <da', a>;  dh = phi'(h) scale da';  weighted_a = scale a;  zero in padding rows.
  // dot [rows], or nullptr. weighted_a.data, dh[0].data nullptr: not requested. dh_q: gate and up, rounded to the dtype
  // of h and then quantised.
  void (*intermediate_backward)(const Activation& activation, const GateUpOrder& order, const ResultTile& tile,
                                const float* scale, const Matrix (&h)[2], const Matrix (&dh)[2],
                                const QuantizedRows (&dh_q)[2], const Matrix& weighted_a, float* dot);

  // Writes rows of zeros with scales of 1.
  void (*clear_quantized)(const QuantizedRows& rows, int64_t count, int64_t columns);

  // dot[i] += <row i of m, vector>, vector float32[columns].
  void (*row_dots)(const Matrix& m, int64_t rows, int64_t columns, const float* vector, float* dot);

  // sum[j] = sum over i of scale[i] m[i, j]. Sums are blocked over rows, so that the error grows with the number of
  // blocks, not of rows. Rows with a negative token are skipped. scale == nullptr: 1. tokens == nullptr: no padding.
  void (*column_sums)(const Matrix& m, int64_t rows, int64_t columns, const int32_t* tokens, const float* scale,
                      float* sum);

  // C (+)= op(A) op(B), row-major, [m, k] [k, n]; for builds without oneDNN.
  void (*multiply)(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda,
                   const float* b, int64_t ldb, bool accumulate, float* c, int64_t ldc);
};

AB_DECLARE_ISA(ExpertKernels, kExperts)

}  // namespace anabranch
