// Factors of low-rank adapters as operands of grouped GEMMs on CUDA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "anabranch/experts.h"
#include "core/cuda/device.h"
#include "core/workspace.h"
#include "experts/check.h"
#include "experts/cuda/phases.h"
#include "experts/cuda/strided_copy.h"
#include "experts/precision.h"

namespace anabranch::cuda {

// The orientation of a factor [M, N] in memory: as its weight is stored, so that both can be operand B of one GEMM. The
// weights of FP8 GEMMs are K-major. free_*: a GEMM that reads nothing else accepts both. The factor then keeps its own
// order if it has no gaps; else a copy has contiguous rows (M, N) or columns (N, M).
enum class FactorOrder { rows, columns, free_rows, free_columns };
inline FactorOrder order_like(bool weight_is_transposed) {
  return weight_is_transposed ? FactorOrder::columns : FactorOrder::rows;
}

// A factor [E or 1, M, N] of the dtype of the rows that multiply it: the caller's memory, or a copy in the workspace.
class Factor {
 public:
  Factor() = default;

  // tensor: [E or 1, M, N], or [E or 1, M, P, F] with N = P F columns; nullptr: none. interleaved: P is inside F.
  Factor(Workspace& workspace, const ab_tensor* tensor, int32_t dtype, int64_t E, FactorOrder order,
         bool interleaved = false);

  // Appends the copy that has to be made, if any. Factors of experts without rows are not copied.
  void add_copy(const int32_t* group_sizes, std::vector<StridedCopy>* copies) const;

  const void* data() const { return data_; }
  bool transposed() const { return transposed_; }  // stored as [N, M]
  bool shared() const { return shared_; }

 private:
  const ab_tensor* from_ = nullptr;  // nullptr: no copy is needed
  void* data_ = nullptr;
  int32_t dtype_ = 0;
  bool transposed_ = false;
  bool shared_ = false;
  bool interleaved_ = false;
};

// Copies each factor to a tensor of the caller, if there is one. Factors of experts without rows are not copied.
// group_sizes: [E], on the device.
struct FactorCopy {
  const ab_tensor* from;
  const ab_tensor* to;  // nullptr: no copy
};
ab_status copy_factors(std::initializer_list<FactorCopy> factors, int64_t E, const int32_t* group_sizes,
                       const Device& device, cudaStream_t stream);

// Makes the copies of factors. group_sizes: [E], on the device.
ab_status fill(std::initializer_list<const Factor*> factors, const int32_t* group_sizes, const Device& device,
               cudaStream_t stream);

// The low-rank term u B[e] of a GEMM with N columns.
class LowRankTerm {
 public:
  LowRankTerm() = default;

  // rank 0: no term. fp8: the other operands of the GEMM are FP8. Then u and B^T have rows of padded_rank(rank)
  // elements; other ranks get copies in the workspace, with zeros at the end of rows.
  LowRankTerm(Workspace& workspace, const void* u, const Factor& b, const GroupedSizes& s, int64_t N, int64_t rank,
              int32_t dtype, bool fp8);

  // Makes those copies. u and B must be complete.
  ab_status fill(const Device& device, cudaStream_t stream) const;

  LowRank get() const { return term_; }

 private:
  // Rows [rows, rank] and their copy, which is longer.
  struct Padded {
    const void* from = nullptr;
    void* to = nullptr;
    int64_t rows = 0;
  };
  Padded pad(Workspace& workspace, const void* rows, int64_t count);

  LowRank term_;
  Padded u_;  // without a copy `from` is null
  Padded b_;
  int64_t rank_ = 0;
  int32_t dtype_ = 0;
};

// u = scale x A[e], or with `transposed` u = scale x B[e]^T, for the rows of a GEMM. D: columns of x.
struct LowRankRows {
  const void* x = nullptr;
  bool gathers_x = false;
  int64_t D = 0;
  bool transposed = false;
  float scale = 1.0f;
  void* u = nullptr;  // [R, rank]
  int64_t rank = 0;
};
// rows: everything that does not depend on the adapter.
RowsProduct product_of(const LowRankRows& u, const Factor& factor, RowsProduct rows);

// Rows [R, rank] in the caller's tensor or, if that is nullptr and they are needed, in the workspace.
void* take_low_rank_rows(Workspace& workspace, const ab_tensor* tensor, bool needed, int64_t R, int64_t rank,
                         int32_t dtype);

// The adapter of a grouped GEMM whose rows have a dtype.
template <class Args>
class ProductAdapter {
 public:
  ProductAdapter(Workspace& workspace, const Args& args, const GroupedSizes& s, int32_t dtype)
      : args_(args),
        s_(s),
        a_(workspace, args.lora_a, dtype, s.E, FactorOrder::free_columns),
        b_(workspace, args.lora_b, dtype, s.E, order_like(args.transpose_w != 0 || is_fp8(args))),
        u_(take_low_rank_rows(workspace, args.lora_u, s.rank > 0, s.R, s.rank, dtype)),
        term_(workspace, u_, b_, s, s.N, s.rank, dtype, is_fp8(args)) {}

  // Enqueues the copies of the factors and, unless it is given, u. product: the GEMM with w.
  ab_status compute(const RowsProduct& product, const Device& device, cudaStream_t stream) const {
    AB_RETURN_IF_ERROR(fill({&a_, &b_}, product.group_sizes, device, stream));
    if (args_.lora_a != nullptr) {
      const LowRankRows u{.x = product.x, .D = s_.D, .scale = args_.lora_scale, .u = u_, .rank = s_.rank};
      AB_RETURN_IF_ERROR(compute_rows_product(product_of(u, a_, product), device, stream));
    }
    return term_.fill(device, stream);
  }

  LowRank low_rank() const { return term_.get(); }

 private:
  const Args& args_;
  GroupedSizes s_;
  Factor a_;
  Factor b_;
  void* u_;
  LowRankTerm term_;
};

}  // namespace anabranch::cuda
