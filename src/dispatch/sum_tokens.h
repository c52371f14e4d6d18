// The sums of rows by token for few slots per token, to memory of one or several devices.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "dispatch/check.h"

namespace anabranch::cuda {

// Where sums go: those of tokens [p T, (p + 1) T) to data[p], as [T, D]. A place may be memory of another device.
struct Places {
  static constexpr int kMost = 16;
  void* data[kMost];
  int64_t T;
  int count;
};

// Whether compute_token_sums supports K slots per token, sums of D columns and these dtypes: up to 32 slots, whole
// 16-byte accesses and 16 bits.
bool fits_token_sums(int64_t K, int64_t D, int32_t dtype_of_rows, int32_t dtype_of_sums);

// compute_sum() with the same bits, but the sums go to the places. The data of sum.out is not used, and there is no
// addend. Rows and places must be aligned to 16 bytes. Faster than compute_sum() if tokens have few rows, or rows few
// columns.
ab_status compute_token_sums(const GatherSum& sum, const Places& places, cudaStream_t stream);

}  // namespace anabranch::cuda
