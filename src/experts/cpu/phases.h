// Loops over tiles, of which the expert operations consist. Each output element belongs to exactly one task.
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/workspace.h"
#include "experts/block_scale.h"
#include "experts/cpu/groups.h"
#include "experts/cpu/product.h"

namespace anabranch {

// Row information that all phases of an operation read, and the rows as tiles.
struct GroupedRows {
  int64_t R = 0;
  int64_t E = 0;
  int32_t* tokens = nullptr;  // [R]: token of each row, -1 for padding; nullptr: operands are in expert order
  float* scale = nullptr;     // [R]: weight of each row; nullptr: 1
  RowRange* groups = nullptr;
  RowTile* tiles = nullptr;
  int64_t num_tiles = 0;

  // Allocates the arrays in the workspace.
  GroupedRows(Workspace& workspace, int64_t num_rows, int64_t num_experts, bool by_slot, bool weighted);

  // Fills the arrays. With slot_of_row, row r belongs to token slot / K if 0 <= slot < T K.
  void fill(int threads, const ab_tensor* group_sizes, const ab_tensor* slot_of_row, const ab_tensor* weights,
            int64_t T, int64_t K);
};

// Number of threads for an operation with R elements_per_row multiply-adds: small ones are faster on one thread.
int threads_for(const ab_exec* exec, int64_t R, int64_t elements_per_row);

// One matrix op(B) per expert: [E, D, N], or transposed [E, N, D].
struct ExpertMatrices {
  void* data;
  int32_t dtype;
  bool transposed;
  BlockScales scales = {};   // of the first expert; e4m3 only
  bool shared = false;       // a single matrix for all experts
  PackedBlocks packed = {};  // of the first expert

  Matrix expert_matrix(int64_t e, int64_t N, int64_t D) const;
  int32_t value_dtype() const { return packed.dtype != 0 ? packed.dtype : dtype; }

  // Granularity of column parts. It is that of plain weights for packed ones, so that both have the same sums.
  int64_t column_step() const { return dtype == AB_FLOAT8_E4M3 && packed.dtype == 0 ? kScaleBlock : 64; }
};
ExpertMatrices matrices_of(const ab_tensor* tensor, bool transposed);

// A second product u op(B[e]) that is added to the sums of a product. u [R, rank].
struct LowRankProduct {
  Matrix u = {};
  ExpertMatrices b = {};
  int64_t rank = 0;  // 0: none

  // Adds columns begin..begin+n of the product, for the first m rows from row `row` on, to c.
  void add(Products& products, int thread, int64_t expert, int64_t row, int64_t m, int64_t columns, int64_t begin,
           int64_t n, const Matrix& c) const;
};

// y[r] = scale[r] (x[r] op(W[e]) + low_rank) + bias_scale[r] bias[e] for every row; zero in padding rows. x [R, D], y
// [R, N].
struct RowProduct {
  Matrix x;
  ExpertMatrices w;
  Matrix y;
  int64_t N;
  int64_t D;
  const float* scale = nullptr;     // nullptr: factor
  const ab_tensor* bias = nullptr;  // [E, N]
  const float* bias_scale = nullptr;
  LowRankProduct low_rank = {};
  float factor = 1.0f;  // scale of all rows
};
void multiply_grouped_rows(Products& products, int threads, const GroupedRows& rows, const RowProduct& op);

// d_w[e] = a^T b over the rows of expert e; zero without rows. a [R, M], b [R, N], d_w [E, M, N]; or [1, M, N], the sum
// over the experts in ascending order. adds: adds to d_w, which must be float32.
void weight_gradient(Products& products, int threads, const GroupedRows& rows, const Matrix& a, int64_t M,
                     const Matrix& b, int64_t N, bool adds, const ab_tensor* d_w);

// d_bias[e] = sum of scale[r] m[r] over the rows of expert e, without padding; zero without rows. m [R, N], d_bias [E,
// N].
void bias_gradient(Products& products, int threads, const GroupedRows& rows, const Matrix& m, int64_t N,
                   const float* scale, const ab_tensor* d_bias);

// Selects gate or up in intermediate rows, from row `row` and column `begin` of F on. For ungated experts both select
// the same columns.
struct IntermediateParts {
  GateUpOrder order;
  int64_t F;

  int64_t up_begin() const { return !order.gated ? 0 : order.interleaved ? 1 : F; }
  int64_t column(int64_t begin) const { return begin * order.step(); }
  Matrix gate(const Matrix& rows, int64_t row, int64_t begin) const { return at(rows, row, column(begin)); }
  Matrix up(const Matrix& rows, int64_t row, int64_t begin) const { return at(rows, row, up_begin() + column(begin)); }

  // Clears `columns` columns of each part.
  void clear(const Matrix& rows, int64_t row, int64_t begin, int64_t num_rows, int64_t columns) const;
};

// Clears the first `columns` elements of `rows` rows. Does nothing if data is nullptr.
void clear_rows(const Matrix& m, int64_t rows, int64_t columns);

// Loads columns begin..begin+count of row e of a bias [E, N] as float32 into `to`. Returns nullptr without a bias.
const float* bias_row(const ExpertKernels& kernels, const ab_tensor* bias, int64_t e, int64_t N, int64_t begin,
                      int64_t count, float* to);

}  // namespace anabranch
