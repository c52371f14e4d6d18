// Native kernels of torch's operations `anabranch::*`.
#ifndef ANABRANCH_TORCH_OPERATIONS_H_
#define ANABRANCH_TORCH_OPERATIONS_H_

#include <string>

#include "torch/shims.h"

namespace anabranch::torch {

// Adds an operation and returns its number.
//
// kinds has one letter per argument of its schema:
//   T Tensor, t Tensor?, n SymInt, i int, b bool, f float, d ScalarType, D ScalarType?, I int[], F float[], s str
int32_t add_operation(const char* name, const char* kinds);

// Registers the kernel of the operation of that name in a namespace for a dispatch key, "CPU" or "CUDA".
void register_operation(int32_t number, const char* space, const char* dispatch_key);

// The value of an optional argument that is given; frees its memory.
Value unwrap(Value optional);

// Takes an argument of kind T or t off the stack; NULL if it is not given.
Tensor take_tensor(Value value, char kind);

// The number of an operation by its name.
int32_t operation_number(const std::string& name);

}  // namespace anabranch::torch

#endif  // ANABRANCH_TORCH_OPERATIONS_H_
