#ifndef ANABRANCH_TORCH_GROUP_LAYER_H_
#define ANABRANCH_TORCH_GROUP_LAYER_H_

#include "torch/shims.h"

namespace anabranch::torch {

// Kernels of anabranch::group_forward, anabranch::group_hidden and anabranch::group_inputs; layer/native_group.py has
// their schemas.
void group_forward(Value* stack, uint64_t num_arguments, uint64_t num_results);
void group_hidden(Value* stack, uint64_t num_arguments, uint64_t num_results);
void group_inputs(Value* stack, uint64_t num_arguments, uint64_t num_results);

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_GROUP_LAYER_H_
