// GEMMs with packed weights (MXFP4 and FP8 blocks) on CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "anabranch/types.h"
#include "experts/cuda/ops/intermediate_gradient.h"
#include "experts/cuda/ops/rows_product.h"
#include "experts/cuda/ops/up.h"

namespace anabranch::cuda {

// Matrices [E, N, C] in memory. A GEMM sums over C.
struct PackedMatrices {
  const uint8_t* values = nullptr;
  const void* scales = nullptr;
  int32_t dtype = 0;  // AB_FLOAT4_E2M1X2 or AB_FLOAT8_E4M3
  int32_t scales_dtype = 0;
  int64_t N = 0;
  int64_t C = 0;

  bool is_fp4() const { return dtype == AB_FLOAT4_E2M1X2; }
};

// Phases whose weights are packed; `w_in`, `w_out` or `w` is not read. The columns of a RowsProduct begin with
// first_column.
struct PackedUp : Up {
  PackedMatrices packed;
};
struct PackedIntermediateGradient : IntermediateGradient {
  PackedMatrices packed;  // [E, D, F]
};
struct PackedRowsProduct : RowsProduct {
  PackedMatrices packed;
  int64_t first_column = 0;
};

// The most rows of a range in the small-M kernels (few_rows/) of aligned operands; of others 8. They read the weights
// of an expert once per range; more rows take more instructions per weight.
constexpr int64_t rows_of_range(int64_t R, int64_t E) { return R <= 4 * E ? 8 : R <= 10 * E ? 16 : 32; }

// Whether a GEMM of R rows with matrices [E, N, C] reads them packed, by the small-M kernels; else they may be unpacked
// into scratch memory. Depends on sizes alone, because workspace sizes must agree with it. With 32 rows per expert
// Hopper's kernels are as fast or faster.
inline bool reads_packed(int64_t R, int64_t E, int64_t N, int64_t C, int32_t dtype) {
  constexpr int64_t kMaxRowsPerExpert = 24;       // on average
  constexpr int64_t kMaxRanges = 640;             // shared memory lists up to 1461 ranges of 8 rows
  constexpr int64_t kMaxSize = int64_t{1} << 20;  // kernels index in int32
  return (dtype == AB_BFLOAT16 || dtype == AB_FLOAT16) && std::min({R, E, N, C}) > 0 &&
         std::max({R, E, N, C}) <= kMaxSize && E * N <= INT32_MAX && R <= kMaxRowsPerExpert * E &&
         N * C <= int64_t{1} << 36 && R / rows_of_range(R, E) + std::min(R, E) <= kMaxRanges;
}

}  // namespace anabranch::cuda
