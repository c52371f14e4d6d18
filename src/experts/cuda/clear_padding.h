// Zeros for the padding rows of a feed-forward network on CUDA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "core/floats.h"
#include "experts/cuda/ops/row_map.h"

namespace anabranch::cuda {

// The rows of m [R, columns] whose slot is none become zero.
ab_status clear_padding(const RowMap& map, const Floats& m, int64_t R, int64_t columns, int multiprocessors,
                        cudaStream_t stream);

}  // namespace anabranch::cuda
