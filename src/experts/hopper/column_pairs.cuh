// Work on the accumulators of 8 neighbouring columns in a loop that stays one.
//
// Accumulators stand in registers, which no index finds at run time, so loops over them are unrolled. Of formulas of
// many instructions that would be most of the kernel's code and of the time to compile it. Here the words that a step
// works on are always the first ones, and the others move up by one place each time.
#pragma once

#include <cstdint>

namespace anabranch::cuda::hopper {

constexpr int kPairs = 4;

// step(in, out) for each pair of columns; in: its words of each row of `in`, which is lost; out: its words of each row
// of `out`.
template <int kIn, int kOut, class Step>
__device__ __forceinline__ void for_column_pairs(uint32_t (&in)[kIn][kPairs], uint32_t (&out)[kOut][kPairs],
                                                 const Step& step) {
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
    uint32_t first[kIn];
    uint32_t result[kOut];
#pragma unroll
    for (int row = 0; row < kIn; ++row) first[row] = in[row][0];
    step(first, result);
#pragma unroll
    for (int row = 0; row < kIn; ++row) move_up(in[row], 0);
#pragma unroll
    for (int row = 0; row < kOut; ++row) move_up(out[row], result[row]);
  }
}

}  // namespace anabranch::cuda::hopper
