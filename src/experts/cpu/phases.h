// The loops over tiles that the expert operations are made of. Each output element belongs to one task.
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/workspace.h"
#include "experts/block_scale.h"
#include "experts/cpu/groups.h"
#include "experts/cpu/product.h"

namespace anabranch {

// What every row of an operation reads, and the rows as tiles.
struct GroupedRows {
  int64_t R = 0;
  int64_t E = 0;
  int32_t* tokens = nullptr;  // [R] token of each row, -1 for padding; nullptr: operands hold rows
  float* scale = nullptr;     // [R] weight of each row; nullptr: 1
  RowRange* groups = nullptr;
  RowTile* tiles = nullptr;
  int64_t num_tiles = 0;

  // Takes the arrays off the workspace.
  GroupedRows(Workspace& workspace, int64_t num_rows, int64_t num_experts, bool by_slot, bool weighted);

  // Reads the device's data. With slot_of_row: row r is token slot / K if 0 <= slot < T K.
  void fill(int threads, const ab_tensor* group_sizes, const ab_tensor* slot_of_row, const ab_tensor* weights,
            int64_t T, int64_t K);
};

// Threads for an operation of so many multiply-adds: small ones are faster on one.
int threads_for(const ab_exec* exec, int64_t R, int64_t elements_per_row);

// Matrices of which each expert's is one op(B): [E, D, N], or transposed [E, N, D].
struct ExpertMatrices {
  void* data;
  int32_t dtype;
  bool transposed;
  BlockScales scales = {};  // of e4m3: the first expert's

  Matrix of_expert(int64_t e, int64_t N, int64_t D) const;

  // What parts of the N columns are multiples of.
  int64_t column_step() const { return dtype == AB_FLOAT8_E4M3 ? kScaleBlock : 64; }
};
ExpertMatrices matrices_of(const ab_tensor* tensor, bool transposed);

// y[r] = scale[r] x[r] op(W[e]) + bias_scale[r] bias[e] for every row; zero in padding. x [R, D], y [R, N].
struct RowProduct {
  Matrix x;
  ExpertMatrices w;
  Matrix y;
  int64_t N;
  int64_t D;
  const float* scale = nullptr;     // nullptr: 1
  const ab_tensor* bias = nullptr;  // [E, N]
  const float* bias_scale = nullptr;
};
void multiply_grouped_rows(Products& products, int threads, const GroupedRows& rows, const RowProduct& op);

// d_w[e] = a^T b over the rows of expert e, zero without rows. a [R, M], b [R, N], d_w [E, M, N]. adds: to what stands
// in d_w, float32.
void weight_gradient(Products& products, int threads, const GroupedRows& rows, const Matrix& a, int64_t M,
                     const Matrix& b, int64_t N, bool adds, const ab_tensor* d_w);

// d_bias[e] = sum of scale[r] m[r] over the rows of expert e but padding, zero without rows. m [R, N], d_bias [E, N].
void bias_gradient(Products& products, int threads, const GroupedRows& rows, const Matrix& m, int64_t N,
                   const float* scale, const ab_tensor* d_bias);

// Columns `begin` on of gate and up, or of the hidden columns alone, in rows of hidden columns from `row` on.
struct HiddenParts {
  HiddenColumns order;
  int64_t F;

  int64_t up_begin() const { return !order.gated ? 0 : order.interleaved ? 1 : F; }
  int64_t column(int64_t begin) const { return begin * order.step(); }
  Matrix gate(const Matrix& rows, int64_t row, int64_t begin) const { return at(rows, row, column(begin)); }
  Matrix up(const Matrix& rows, int64_t row, int64_t begin) const { return at(rows, row, up_begin() + column(begin)); }

  // As many columns of each part become zero.
  void clear(const Matrix& rows, int64_t row, int64_t begin, int64_t num_rows, int64_t columns) const;
};

// The first `columns` elements of `rows` rows become zero; data nullptr: nothing does.
void clear_rows(const Matrix& m, int64_t rows, int64_t columns);

// Row e of a bias [E, N], columns begin..begin+count, as float32 in `to`; nullptr without a bias.
const float* bias_row(const ExpertKernels& kernels, const ab_tensor* bias, int64_t e, int64_t N, int64_t begin,
                      int64_t count, float* to);

}  // namespace anabranch
