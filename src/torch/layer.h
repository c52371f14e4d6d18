#ifndef ANABRANCH_TORCH_LAYER_H_
#define ANABRANCH_TORCH_LAYER_H_

#include "torch/shims.h"

namespace anabranch::torch {

// Kernels of anabranch::layer_forward and anabranch::layer_backward; layer/native_passes.py has their schemas.
void layer_forward(Value* stack, uint64_t num_arguments, uint64_t num_results);
void layer_backward(Value* stack, uint64_t num_arguments, uint64_t num_results);

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_LAYER_H_
