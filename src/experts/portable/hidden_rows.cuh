// How the columns of hidden rows stand, gate and up in two parts or alternating, for epilogues that work on
// neighbouring columns of both.
#pragma once

#include "experts/check.h"
#include "experts/portable/staged_tile.cuh"

namespace anabranch::cuda::portable {

// Rows [R, parts, F], or [R, F, parts].
struct HiddenLayout {
  int32_t F = 0;
  int32_t parts = 1;
  bool interleaved = false;

  HiddenLayout() = default;
  explicit HiddenLayout(const FfnSizes& s)
      : F(static_cast<int32_t>(s.F)), parts(static_cast<int32_t>(s.P)), interleaved(s.P == 2 && s.layout.interleaved) {}

  // kEach neighbouring columns of F and their gates and ups are two runs of kEach neighbours in a hidden row. Where the
  // i-th one begins, and how many of it there are.
  AB_INLINE int32_t begin_of_run(int32_t column, int i, int each) const {
    return interleaved ? 2 * column + i * each : i * F + column;
  }
  AB_INLINE int32_t count_of_run(int32_t column, int i, int each) const {
    return interleaved ? 2 * (F - column) - i * each : F - column;
  }
};

// From two runs to gates and ups, and back.
template <int kEach>
__device__ __forceinline__ void separate(bool interleaved, Neighbours<kEach>& first, Neighbours<kEach>& second) {
  if (!interleaved) return;
  float both[2 * kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    both[i] = first[i];
    both[kEach + i] = second[i];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    first[i] = both[2 * i];
    second[i] = both[2 * i + 1];
  }
}
template <int kEach>
__device__ __forceinline__ void alternate(bool interleaved, Neighbours<kEach>& gate, Neighbours<kEach>& up) {
  if (!interleaved) return;
  float both[2 * kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    both[2 * i] = gate[i];
    both[2 * i + 1] = up[i];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    gate[i] = both[i];
    up[i] = both[kEach + i];
  }
}

}  // namespace anabranch::cuda::portable
