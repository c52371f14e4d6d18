#ifndef ANABRANCH_TORCH_LAYER_H_
#define ANABRANCH_TORCH_LAYER_H_

#include <string>

#include "torch/shims.h"

namespace anabranch::torch {

// Adds the options of a layer and returns their number.
//   layer, network: the bytes in the keys of its operations (see Arguments)
//   parts_first: whether a parameter [E, P F, D] has the gate's rows first, then the up rows
int32_t add_config(const std::string& layer, const std::string& network, bool parts_first);

// Kernels of anabranch::layer_forward and anabranch::layer_backward; layer/native_passes.py has their schemas.
void layer_forward(Value* stack, uint64_t num_arguments, uint64_t num_results);
void layer_backward(Value* stack, uint64_t num_arguments, uint64_t num_results);

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_LAYER_H_
