// Processes the accumulators of 8 adjacent columns, two columns at a time.
//
// Accumulators live in registers, which have no run-time index, so loops over them are unrolled. For formulas with many
// instructions, unrolling would dominate the kernel's code size and compile time. Their loop stays rolled: each step
// works on the first words, and the remaining words shift up by one place per step.
#pragma once

#include <cstdint>

namespace anabranch::cuda::hopper {

constexpr int kPairs = 4;

// Calls step(in, out) for each pair of columns. Its `in` holds one word per row of the argument `in`, which is
// destroyed; its `out` becomes one word per row of the argument `out`.
template <bool kRolled, int kIn, int kOut, class Step>
__device__ __forceinline__ void for_column_pairs(uint32_t (&in)[kIn][kPairs], uint32_t (&out)[kOut][kPairs],
                                                 const Step& step) {
  uint32_t first[kIn];
  uint32_t result[kOut];
  if constexpr (!kRolled) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int row = 0; row < kIn; ++row) first[row] = in[row][pair];
      step(first, result);
#pragma unroll
      for (int row = 0; row < kOut; ++row) out[row][pair] = result[row];
    }
  } else {
    const auto move_up = [](uint32_t (&words)[kPairs], uint32_t last) {
#pragma unroll
      for (int i = 0; i < kPairs - 1; ++i) words[i] = words[i + 1];
      words[kPairs - 1] = last;
    };
#pragma unroll
    for (int row = 0; row < kOut; ++row) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) out[row][i] = 0;
    }
#pragma unroll 1
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int row = 0; row < kIn; ++row) first[row] = in[row][0];
      step(first, result);
#pragma unroll
      for (int row = 0; row < kIn; ++row) move_up(in[row], 0);
#pragma unroll
      for (int row = 0; row < kOut; ++row) move_up(out[row], result[row]);
    }
  }
}

}  // namespace anabranch::cuda::hopper
