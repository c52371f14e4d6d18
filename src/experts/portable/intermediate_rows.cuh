// Column layout of intermediate rows, for epilogues that work on adjacent gate and up columns: gate and up are two
// separate parts or alternate.
#pragma once

#include "experts/check.h"
#include "experts/portable/staged_tile.cuh"

namespace anabranch::cuda::portable {

// Rows [R, parts, F], or [R, F, parts].
struct IntermediateRowLayout {
  int32_t F = 0;
  int32_t parts = 1;
  bool interleaved = false;

  IntermediateRowLayout() = default;
  explicit IntermediateRowLayout(const FfnSizes& s)
      : F(static_cast<int32_t>(s.F)), parts(static_cast<int32_t>(s.P)), interleaved(s.P == 2 && s.layout.interleaved) {}

  // In an intermediate row, the gates and ups of kEach adjacent columns of F form two runs of kEach adjacent elements.
  // Returns the first index of the i-th run, and the number of elements from there to the end of its part.
  AB_INLINE int32_t begin_of_run(int32_t column, int i, int each) const {
    return interleaved ? 2 * column + i * each : i * F + column;
  }
  AB_INLINE int32_t count_of_run(int32_t column, int i, int each) const {
    return interleaved ? 2 * (F - column) - i * each : F - column;
  }
};

// Converts two runs into gates and ups, and back.
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
