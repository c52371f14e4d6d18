// One matrix product on one thread, by oneDNN where the build has it.
#pragma once

#include <cstdint>

namespace anabranch {

// Whether bfloat16 operands are multiplied as they are: oneDNN has instructions for it on this CPU, or
// ANABRANCH_BF16=native asks for it. Otherwise they are converted to float32 first.
bool multiplies_bf16();

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

// Both return false when oneDNN fails (no memory).
bool gemm_f32(const GemmShape& shape, const float* a, const float* b, float* c);
bool gemm_bf16(const GemmShape& shape, const void* a, const void* b, void* c);

}  // namespace anabranch
