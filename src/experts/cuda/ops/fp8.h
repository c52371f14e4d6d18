// FP8 (e4m3) GEMMs with one float32 scale per block of 128 elements, for Hopper.
#pragma once

#include "experts/block_scale.h"
#include "experts/cuda/ops/intermediate_gradient.h"
#include "experts/cuda/ops/rows_product.h"
#include "experts/cuda/ops/up.h"

namespace anabranch::cuda {

// Rows of K elements with one scale per 128 contiguous elements.
struct Fp8Rows {
  const void* values = nullptr;   // [rows, K]
  const float* scales = nullptr;  // [rows, K / 128]
};

// Rows that a GEMM writes.
struct Fp8Output {
  void* values = nullptr;
  float* scales = nullptr;
  bool power_of_two = false;  // round the scales up to powers of two
};

// Operand B of a GEMM, K-major. There is one scale per 128 x 128 elements of an expert and part; offsets of scales are
// in elements.
struct Fp8Weights {
  const void* values = nullptr;  // [E, P, columns, K], or [E, columns, K]
  const float* scales = nullptr;
  int64_t count = 0;          // number of scales, from `scales` on
  int64_t expert_stride = 0;  // from one expert to the next
  int64_t k_stride = 0;       // from 128 k to the next
  int64_t column_stride = 0;  // from 128 columns to the next
  int64_t part_stride = 0;    // from gate to up
};

// Phases with FP8 operands and results, in addition to the fields of their 16-bit forms. The matrix B of a low-rank
// term is K-major, with gate before up. `a` is written in e4m3, and in 16 bits too if Up::a has memory.
struct Fp8Up : Up {
  Fp8Rows x8;  // gathered
  Fp8Weights w8;
  Fp8Output a8;
};
struct Fp8RowsProduct : RowsProduct {
  Fp8Rows x8;
  Fp8Weights w8;
};
struct Fp8IntermediateGradient : IntermediateGradient {
  Fp8Rows d_y8;  // gathered
  Fp8Weights w8;
  Fp8Output dh8;  // [R, P, F], gate before up; or none
};

}  // namespace anabranch::cuda
