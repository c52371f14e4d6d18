// One matrix product on one thread, by oneDNN where the build has it.
#pragma once

#include <cstdint>

#include "core/status.h"

namespace anabranch {

// What becomes of bfloat16 operands: multiplied as they are, where oneDNN has instructions for it on this CPU, or
// converted to float32 first. ANABRANCH_BF16 = native or convert overrules the choice; refused where it asks for what
// is not there, or for something else.
enum class Bf16Products { native, converted, refused };
Bf16Products bf16_products();

// Unsupported where bfloat16 products are refused.
ab_status check_bf16_products();

// Shape of C (+)= op(A) op(B), row-major: op(A) [m, k], op(B) [k, n], C [m, n], float32 or (of bfloat16 operands, not
// accumulated) rounded to bfloat16; lda, ldb, ldc: elements from one stored row to the next.
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

// Both return 0, or oneDNN's status where it fails, whose meaning gemm_error tells.
int gemm_f32(const GemmShape& shape, const float* a, const float* b, float* c);
int gemm_bf16(const GemmShape& shape, const void* a, const void* b, void* c);
ab_status gemm_error(int failure);

}  // namespace anabranch
