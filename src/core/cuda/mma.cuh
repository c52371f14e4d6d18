// The tensor core instructions of every GPU since Ampere: mma.sync, and ldmatrix, which loads its operands from shared
// memory. experts/portable/shared_tile.h describes which lane holds which element.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace anabranch::cuda {

// Loads four 8 x 8 matrices of 16-bit elements, or 8 x 4 of 32-bit elements. Lane i supplies the 16-byte aligned
// address of row i % 8 of matrix i / 8, and receives word i % 4 of row i / 4 of each matrix.
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// Loads four matrices of 16-bit elements transposed: a lane receives elements 2 (i % 4) and 2 (i % 4) + 1 of column i /
// 4.
__device__ __forceinline__ void load_transposed_matrices(uint32_t address, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// c += a b for 16 x 8 elements and 32 bytes along k: 16 elements of 16 bits, or 8 of TF32. TF32 operands are float32
// numbers whose last 13 bits the instruction ignores.
template <class Element>
__device__ __forceinline__ void multiply_add_matrices(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add_matrices<BFloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                                uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add_matrices<Float16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                               uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add_matrices<float>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace anabranch::cuda
