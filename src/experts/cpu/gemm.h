// Single-threaded matrix multiplication, by oneDNN if the build has it.
#pragma once

#include <cstdint>

#include "core/status.h"

namespace anabranch {

// How bfloat16 operands are multiplied: natively, if oneDNN has instructions for it on this CPU, or converted to
// float32 first. ANABRANCH_BF16 = native or convert overrides the choice. `refused`: the variable has another value, or
// requests native GEMMs that are not available.
enum class Bf16Products { native, converted, refused };
Bf16Products bf16_products();

// Returns AB_UNSUPPORTED if bfloat16 GEMMs are refused.
ab_status check_bf16_products();

// Shape of C (+)= op(A) op(B), row-major: op(A) [m, k], op(B) [k, n], C [m, n]. C is float32, or bfloat16 for bfloat16
// operands without accumulation. lda, ldb, ldc: elements from one stored row to the next.
struct GemmShape {
  bool transpose_a;
  bool transpose_b;
  bool accumulate;
  bool c_is_bf16;
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t lda;
  int64_t ldb;
  int64_t ldc;

  bool operator==(const GemmShape&) const = default;
};

// Both return 0, or oneDNN's error status, which gemm_error() converts.
int gemm_f32(const GemmShape& shape, const float* a, const float* b, float* c);
int gemm_bf16(const GemmShape& shape, const void* a, const void* b, void* c);
ab_status gemm_error(int failure);

}  // namespace anabranch
