// A grouped GEMM whose rows are summed per token on CUDA, one chunk of columns at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "anabranch/experts.h"
#include "core/cuda/device.h"
#include "exchange/cuda/returning.h"
#include "experts/check.h"
#include "experts/cuda/fp8_product.h"

namespace anabranch::cuda {

// Enqueues the operation; the arguments must have been checked. columns: chunk size, a multiple of 64 or all columns.
// buffer: [R, columns] in the dtype of the rows, 16-byte aligned. adapter: of all columns. fp8:
// quantised operands, or nullptr. unpacked: scratch memory for packed weights, see MaybePacked. returning: the chunks
// of columns return to their ranks; or nullptr.
ab_status multiply_and_combine(const ab_grouped_matmul_combine_args& args, const CombinedSizes& sizes, int64_t columns,
                               void* buffer, const Device& device, cudaStream_t stream, const LowRank& adapter = {},
                               const Fp8Product<ab_grouped_matmul_combine_args>* fp8 = nullptr,
                               void* unpacked = nullptr, const ReturningSums* returning = nullptr);

}  // namespace anabranch::cuda
