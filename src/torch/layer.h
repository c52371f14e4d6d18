#ifndef ANABRANCH_TORCH_LAYER_H_
#define ANABRANCH_TORCH_LAYER_H_

#include <string>

#include "torch/shims.h"

namespace anabranch::torch {

// Adds the options of a layer, in the form of keys (see Arguments), and returns their number.
int32_t add_config(const std::string& layer, const std::string& network, bool parts_first);

// Kernels of anabranch::layer_forward and anabranch::layer_backward; layer/native.py has their schemas.
void layer_forward(Value* stack, uint64_t num_arguments, uint64_t num_results);
void layer_backward(Value* stack, uint64_t num_arguments, uint64_t num_results);

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_LAYER_H_
