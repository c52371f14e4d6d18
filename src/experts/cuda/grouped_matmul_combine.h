// A grouped product and the sum of its rows by token on CUDA, chunk after chunk of columns.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "anabranch/experts.h"
#include "core/cuda/device.h"
#include "experts/check.h"
#include "experts/cuda/fp8_product.h"

namespace anabranch::cuda {

// Enqueues what checked arguments ask for, so many columns at a time: multiples of 64, or all. buffer: [R, columns] of
// the dtype of the rows, at a multiple of 16 bytes. fp8: the quantised operands, or nullptr.
ab_status multiply_and_combine(const ab_grouped_matmul_combine_args& args, const CombinedSizes& sizes, int64_t columns,
                               void* buffer, const Device& device, cudaStream_t stream,
                               const Fp8Product<ab_grouped_matmul_combine_args>* fp8 = nullptr);

}  // namespace anabranch::cuda
