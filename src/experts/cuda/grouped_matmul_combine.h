// A grouped product and the sum of its rows by token on CUDA, chunk after chunk of columns.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "anabranch/experts.h"
#include "core/cuda/device.h"
#include "experts/check.h"

namespace anabranch::cuda {

// Enqueues what checked arguments ask for, so many columns at a time: multiples of 64, or all. buffer: [R, columns] of
// the dtype of x, at a multiple of 16 bytes.
ab_status multiply_and_combine(const ab_grouped_matmul_combine_args& args, const CombinedSizes& sizes, int64_t columns,
                               void* buffer, const Device& device, cudaStream_t stream);

}  // namespace anabranch::cuda
