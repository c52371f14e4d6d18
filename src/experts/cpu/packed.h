// Packed weights (MXFP4 and FP8 blocks) as operands of tiles, and as values in memory.
#pragma once

#include <cstdint>

#include "experts/cpu/kernels.h"

namespace anabranch {

// Kernels for one instruction set.
struct PackedKernels {
  // Writes the values of a submatrix, rounded to from.packed.dtype, as `dtype`: the same one, or float32. Rows of `to`
  // are `stride` elements apart; rows from `rows` to `padded_rows` are zero. Columns are whole blocks of MXFP4.
  void (*unpack)(const Matrix& from, int64_t rows, int64_t padded_rows, int64_t columns, int32_t dtype, void* to,
                 int64_t stride);

  // Packs `blocks` blocks of 32 consecutive elements as MXFP4. ceil: the rule of the scale.
  void (*pack)(int32_t dtype, const void* w, int64_t blocks, bool ceil, uint8_t* codes, uint8_t* scales);

  // Converts scales of FP8 blocks to float32.
  void (*load_scales)(int32_t dtype, const void* from, int64_t count, float* to);
};

AB_DECLARE_ISA(PackedKernels, kPacked)

}  // namespace anabranch
