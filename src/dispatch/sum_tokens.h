// The sums of rows by token on a few SMs, for few slots per token.
#pragma once

#include <cuda_runtime.h>

#include "anabranch/types.h"
#include "core/cuda/device.h"
#include "dispatch/check.h"

namespace anabranch::cuda {

// Where sums go: those of tokens [p T, (p + 1) T) to places[p], as [T, D]. A place may be memory of another device.
struct Places {
  static constexpr int kMost = 16;
  void* data[kMost];
  int64_t T;
};

// Whether compute_token_sums supports K slots per token and these dtypes: up to 32 slots, and 16 bits.
bool fits_token_sums(int64_t K, int32_t dtype_of_rows, int32_t dtype_of_sums);

// compute_sum() with the same bits, but the sums go to the places. The data of sum.out is not used, and there is no
// addend. Rows and places must be aligned to 16 bytes, and their width to 8 elements. Takes `blocks` SMs or fewer.
ab_status compute_token_sums(const GatherSum& sum, const Places& places, const Device& device, int64_t blocks,
                             cudaStream_t stream);

}  // namespace anabranch::cuda
