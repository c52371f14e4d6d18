// Quantisation of rows and weights to e4m3 with one scale per block.
#pragma once

#include <cstdint>

#include "experts/check.h"
#include "experts/cpu/kernels.h"

namespace anabranch {

// Kernels for one instruction set.
struct QuantizeKernels {
  // Computes q and scales of rows whose columns are `step` elements apart.
  void (*rows)(const Matrix& from, int64_t step, int64_t rows, int64_t columns, const QuantizedRows& to);

  // Quantises one block of weights. Element (i, j) is at i outer_stride + j inner_stride elements. q has rows along the
  // outer axis. Returns the scale.
  float (*weights)(int32_t dtype, const void* from, int64_t outer_stride, int64_t inner_stride, bool power_of_two,
                   uint8_t* q);
};

AB_DECLARE_ISA(QuantizeKernels, kQuantize)

// Quantises rows, which must not be gathered. Their columns are `step` elements apart.
void quantize_rows(int threads, const Matrix& from, int64_t step, int64_t rows, int64_t columns,
                   const QuantizedRows& to);

// Weights of a float dtype and their row-major destinations: q [E, D, P, F] and q_transposed [E, P, F, D], each or
// nullptr. scales [E, D/128, P, F/128].
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
