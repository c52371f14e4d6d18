// The gate's GEMMs, in the same way as python/anabranch/torch/layer/gate.py. A CPU multiplies in float32 by the
// library's grouped GEMM; a GPU multiplies operands of one dtype, float32 or bfloat16, by cuBLAS.
// layer/native_passes.py excludes other dtypes there.
#ifndef ANABRANCH_TORCH_GATE_H_
#define ANABRANCH_TORCH_GATE_H_

#include <utility>

#include "torch/shims.h"

namespace anabranch::torch {

// x gate, float32 [T, E].
Tensor gate_logits(const Tensor& x, const Tensor& gate);

// d_x in the dtype of x, and d_gate in float32; NULL if it is not requested. On a GPU d_logits has the dtype of x.
std::pair<Tensor, Tensor> gate_backward(const Tensor& x, const Tensor& gate, const Tensor& d_logits, bool needs_x,
                                        bool needs_gate);

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_GATE_H_
