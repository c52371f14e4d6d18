// What happens to a tile before and after its matrix product, for each instruction set.
#pragma once

#include <cstdint>

#include "core/isa.h"
#include "experts/activation.h"

namespace anabranch {

// The scales of a matrix of e4m3: one for 128 columns of each row, or of 128 rows.
struct BlockScales {
  float* data = nullptr;
  int64_t row_stride = 0;  // from a row of blocks to the next
  int64_t column_stride = 0;
  int64_t block_rows = 1;
};

// Rows of a stored matrix, of which a tile takes the first columns. Row i is row rows[i], zeros if that is negative;
// rows == nullptr: row i itself.
struct Matrix {
  void* data;
  int32_t dtype;
  int64_t stride;  // elements from one row to the next
  const int32_t* rows;
  BlockScales scales = {};
};

// Where rows are written as e4m3, with a scale for 128 columns of each; data nullptr: nowhere.
struct QuantizedRows {
  Matrix q;
  bool power_of_two;
};

// Rows and columns of a tile of float32, and the rows that are padding: those with a negative token; nullptr: none.
struct ResultTile {
  const float* data;
  int64_t stride;
  int64_t rows;
  int64_t columns;
  const int32_t* tokens;
};

// The columns of gate and up in hidden rows: all of the gate's first, or alternating.
struct HiddenColumns {
  bool gated;
  bool interleaved;

  int64_t step() const { return interleaved ? 2 : 1; }  // from a column of a part to the next
};

struct ExpertKernels {
  // to[i, :] = float32 of row i of `from`, times its scales, for i < rows; zero for rows <= i < padded_rows. Of e4m3,
  // `from` begins with a block and has whole blocks of columns.
  void (*load)(const Matrix& from, int64_t rows, int64_t padded_rows, int64_t columns, float* to);

  // y = scale tile + bias_scale bias, rounded to y's dtype; zero in padding. bias [columns]; scales [rows], or
  // nullptr: 1.
  void (*store)(const ResultTile& tile, const float* scale, const float* bias, const float* bias_scale,
                const Matrix& y);

  // tile holds h, of gated experts `columns` of gate and of up in the order `tile_order`; bias likewise, or nullptr.
  //   h += bias;  a = scale phi(h_gate, h_up);  zero in padding.
  // h[0], h[1]: the first columns of gate and up where they are kept, in the order `order`; h, a: data nullptr, not
  // wanted, but a has the dtype of h then. a_q is quantised from float32; its columns are whole blocks.
  void (*hidden)(const Activation& activation, const HiddenColumns& order, const HiddenColumns& tile_order,
                 const ResultTile& tile, const float* bias, const float* scale, const Matrix (&h)[2], const Matrix& a,
                 const QuantizedRows& a_q);

  // tile holds da'; h[0] and h[1] from the first columns of gate and up on, replaced in dh[0], dh[1] (which may be the
  // same memory).
  //   dot += <da', a>;  dh = phi'(h) scale da';  weighted_a = scale a;  zero in padding.
  // dot [rows], or nullptr; weighted_a.data, dh[0].data: nullptr: not wanted. dh_q: gate and up, quantised as
  // they are in the dtype of h.
  void (*hidden_backward)(const Activation& activation, const HiddenColumns& order, const ResultTile& tile,
                          const float* scale, const Matrix (&h)[2], const Matrix (&dh)[2],
                          const QuantizedRows (&dh_q)[2], const Matrix& weighted_a, float* dot);

  // Rows of zeros, with scales of 1.
  void (*clear_quantized)(const QuantizedRows& rows, int64_t count, int64_t columns);

  // dot[i] += <row i of m, vector>, vector float32[columns].
  void (*row_dots)(const Matrix& m, int64_t rows, int64_t columns, const float* vector, float* dot);

  // sum[j] = sum over i of scale[i] m[i, j], in blocks of rows so that the error grows with the blocks, not the rows.
  // Rows of a negative token are skipped; scale == nullptr: 1, tokens == nullptr: no padding.
  void (*column_sums)(const Matrix& m, int64_t rows, int64_t columns, const int32_t* tokens, const float* scale,
                      float* sum);

  // C (+)= op(A) op(B), row-major, [m, k] [k, n]: for builds without oneDNN.
  void (*multiply)(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda,
                   const float* b, int64_t ldb, bool accumulate, float* c, int64_t ldc);
};

AB_DECLARE_ISA(ExpertKernels, kExperts)

}  // namespace anabranch
