// Matrix products by the cuBLAS library that torch has loaded, called directly: torch's operation takes 20 us longer.
#ifndef ANABRANCH_TORCH_BLAS_H_
#define ANABRANCH_TORCH_BLAS_H_

#include "torch/shims.h"

namespace anabranch::torch {

// Finds cuBLAS behind torch's CUDA library. Without it, multiply() calls torch's operation.
void find_blas(void* cuda);

// a [M, K] times b [K, N] for matrices of one dtype on a GPU, summed in float32 and rounded to `dtype`, the matrices'
// own or float32. Bitwise equal to torch.mm(a, b) or torch.mm(a, b, out_dtype=torch.float32).
Tensor multiply(const Tensor& a, const Tensor& b, int32_t dtype);

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_BLAS_H_
