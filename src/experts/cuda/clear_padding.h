// Clears the padding rows of a feed-forward network on CUDA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "anabranch/types.h"
#include "core/floats.h"
#include "experts/cuda/ops/row_map.h"

namespace anabranch::cuda {

// Sets the rows of m [R, columns] without an assignment to zero.
ab_status clear_padding(const RowMap& map, const Floats& m, int64_t R, int64_t columns, int multiprocessors,
                        cudaStream_t stream);

}  // namespace anabranch::cuda
