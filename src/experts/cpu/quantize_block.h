// Quantises one block of a row. Functions have internal linkage because *.isa.cc files include this header.
#pragma once

#include <cstdint>

#include "experts/block_scale.h"
#include "experts/cpu/kernels.h"

namespace anabranch {
namespace {

// Returns the maximum of `largest` and the magnitudes of a block.
AB_INLINE uint32_t largest_magnitude(const float* values, uint32_t largest) {
  for (int64_t j = 0; j < kScaleBlock; ++j) {
    const uint32_t magnitude = magnitude_bits(values[j]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

AB_INLINE void divide_block(const float* values, float scale, Float8E4M3* q) {
  for (int64_t j = 0; j < kScaleBlock; ++j) q[j] = from_float<Float8E4M3>(values[j] / scale);
}

// Quantises `count` values, which must be whole blocks, into row i of `to` from column `begin` on.
AB_INLINE void quantize_values(const float* values, int64_t count, const QuantizedRows& to, int64_t i, int64_t begin) {
  const BlockScales& scales = to.q.scales;
  for (int64_t j = 0; j < count; j += kScaleBlock) {
    const float scale = block_scale(largest_magnitude(values + j, 0), to.power_of_two);
    scales.data[i * scales.row_stride + (begin + j) / kScaleBlock * scales.column_stride] = scale;
    divide_block(values + j, scale, static_cast<Float8E4M3*>(to.q.data) + i * to.q.stride + begin + j);
  }
}

}  // namespace
}  // namespace anabranch
