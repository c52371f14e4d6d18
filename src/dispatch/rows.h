// Arithmetic on rows of D elements, one kernel per instruction set. All instruction sets compute the same bits.
#pragma once

#include <cstdint>

#include "core/isa.h"

namespace anabranch {

struct RowKernels {
  // out[i] = sum over 0 <= j < count, ascending and in float32, of weights[j] * rows[index[j], i], then plus addend[i].
  // rows is [any, D]. addend nullptr: zeros; addend may be out.
  void (*sum)(const void* rows, int32_t rows_dtype, int64_t D, const int32_t* index, const float* weights,
              int64_t count, const void* addend, int32_t addend_dtype, void* out, int32_t out_dtype);
  // out[i] = weight * x[i]
  void (*scale)(const void* x, int32_t x_dtype, int64_t D, float weight, void* out, int32_t out_dtype);
  // returns the sum over i, in float32, of a[i] * b[i]
  float (*dot)(const void* a, int32_t a_dtype, const void* b, int32_t b_dtype, int64_t D);
};

AB_DECLARE_ISA(RowKernels, kRows)

}  // namespace anabranch
