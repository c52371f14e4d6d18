// The sum of blocks from all ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/status.h"
#include "dispatch/elements.h"

namespace anabranch::cuda {

// out[t] = sum over the ranks s of factor * block s[t], plus addend[t]. Sums are float32: the ranks in ascending order,
// then the addend, rounded once; these are the bits of ab_combine. `out` and `addend` may be windows of columns of
// wider tensors, as in compute_sum().
struct SumOfBlocks {
  Rows arrived;  // [P T, columns]; the block of this rank is not read
  const char* own;
  int32_t rank;
  int32_t ranks;
  int64_t T;
  float factor;
  Rows out;
  Rows addend;  // NULL data: zeros
};
ab_status launch_sum(const SumOfBlocks& sum, cudaStream_t stream);

// A part of load_kernels().
ab_status load_sum();

}  // namespace anabranch::cuda
