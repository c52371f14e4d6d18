// Factors of low-rank adapters as operands of GEMMs, and their gradients.
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/workspace.h"
#include "experts/check.h"
#include "experts/cpu/phases.h"

namespace anabranch {

// A factor [E or 1, M, N] of the dtype of the rows that multiply it: the caller's memory, or a copy in the workspace.
// The axis with the larger stride stays the outer one, so a factor and its transposed view have the same matrices in
// memory.
class Factor {
 public:
  Factor() = default;

  // tensor: [E or 1, M, N], or [E or 1, M, P, F] with N = P F columns; nullptr: none. interleaved: P is inside F, for
  // four axes.
  Factor(Workspace& workspace, const ab_tensor* tensor, int32_t dtype, int64_t E, bool interleaved = false);

  // Makes the copy. group_sizes [E]: factors of experts without rows are not copied.
  void fill(int threads, const ab_tensor* group_sizes) const;

  // The factor, or its transpose, as operand B.
  ExpertMatrices matrices(bool transposed) const { return {data_, dtype_, transposed != is_transposed_, {}, shared_}; }

 private:
  const ab_tensor* from_ = nullptr;  // nullptr: no copy is needed
  void* data_ = nullptr;
  int32_t dtype_ = AB_FLOAT32;
  bool shared_ = false;
  bool interleaved_ = false;
  bool is_transposed_ = false;  // data_ is [N, M]
};

// Copies a factor [E or 1, M, N] or [E or 1, M, P, F] to a tensor of the caller; nullptr: no copy. group_sizes [E]:
// factors of experts without rows are not copied.
void copy_factor(int threads, const ab_tensor* factor, const ab_tensor* copy, const ab_tensor* group_sizes);

// u = factor x op(A[e]), rounded to the dtype of u. x [R, D], u [R, rank].
void multiply_low_rank(Products& products, int threads, const GroupedRows& rows, const Matrix& x, int64_t D,
                       const ExpertMatrices& a, float factor, const Matrix& u, int64_t rank);

// Rows [R, rank] in the caller's tensor or, if that is nullptr and they are needed, in the workspace.
Matrix take_low_rank_rows(Workspace& workspace, const ab_tensor* tensor, bool needed, int64_t R, int64_t rank,
                          int32_t dtype);

// The adapter of a grouped GEMM. dtype: of u.
template <class Args>
class ProductAdapter {
 public:
  ProductAdapter(Workspace& workspace, const Args& args, const GroupedSizes& s, int32_t dtype)
      : args_(args),
        s_(s),
        a_(workspace, args.lora_a, dtype, s.E),
        b_(workspace, args.lora_b, dtype, s.E),
        u_(take_low_rank_rows(workspace, args.lora_u, s.rank > 0, s.R, s.rank, dtype)) {}

  // Computes u, unless it is given, and returns the product that uses it.
  LowRankProduct compute(Products& products, int threads, const GroupedRows& rows) const {
    a_.fill(threads, args_.group_sizes);
    b_.fill(threads, args_.group_sizes);
    if (args_.lora_a != nullptr) {
      multiply_low_rank(products, threads, rows, matrix_of(args_.x, 0, s_.D), s_.D, a_.matrices(false),
                        args_.lora_scale, u_, s_.rank);
    }
    return {u_, b_.matrices(false), s_.rank};
  }

 private:
  const Args& args_;
  const GroupedSizes& s_;
  Factor a_;
  Factor b_;
  Matrix u_;
};

// The gradient of a factor [E or 1, M, P, F], computed with P inside F in the workspace and stored with F inside P.
class InterleavedGradient {
 public:
  // needed: false takes no memory.
  InterleavedGradient(Workspace& workspace, const ab_tensor* gradient, bool needed);

  // The tensor to compute: float32 [E or 1, M, F P].
  const ab_tensor* interleaved() const { return &interleaved_; }

  // Stores it, or adds it.
  void store(int threads, bool adds) const;

 private:
  const ab_tensor* gradient_;
  ab_tensor interleaved_;
};

}  // namespace anabranch
