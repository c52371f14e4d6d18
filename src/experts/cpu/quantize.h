// Rows and weights as e4m3 with a scale for each block.
#pragma once

#include <cstdint>

#include "experts/check.h"
#include "experts/cpu/kernels.h"

namespace anabranch {

// For each instruction set.
struct QuantizeKernels {
  // q and scales of rows whose columns are `step` elements apart.
  void (*rows)(const Matrix& from, int64_t step, int64_t rows, int64_t columns, const QuantizedRows& to);

  // q of a block of weights, element (i, j) at i outer_stride + j inner_stride elements, in rows of the outer axis.
  // Returns its scale.
  float (*weights)(int32_t dtype, const void* from, int64_t outer_stride, int64_t inner_stride, bool power_of_two,
                   uint8_t* q);
};

AB_DECLARE_ISA(QuantizeKernels, kQuantize)

// Rows, none gathered, of columns `step` elements apart.
void quantize_rows(int threads, const Matrix& from, int64_t step, int64_t rows, int64_t columns,
                   const QuantizedRows& to);

// Weights of a float dtype, and where they go, row-major: as they are [E, D, P, F], transposed [E, P, F, D]; nullptr:
// nowhere. scales [E, D/128, P, F/128].
struct WeightsToQuantize {
  const void* w;
  int32_t dtype;
  QuantizedSizes s;
  bool power_of_two;
  uint8_t* q;
  uint8_t* q_transposed;
  float* scales;
};
void quantize_weights(int threads, const WeightsToQuantize& op);

}  // namespace anabranch
