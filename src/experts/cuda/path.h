// Chooses the kernels for an operation: Hopper's if they support the operands, else the sm80 path (mma.sync), which
// supports all operands except sizes that portable::check() refuses.
#pragma once

#include "core/cuda/path.h"
#include "experts/hopper/products.h"
#include "experts/portable/products.h"

namespace anabranch::cuda {

template <class Operation>
PathChoice choose_path(const Operation& operation, const Device& device) {
  PathChoice choice = first_path(device);
  if (choice.path == Path::hopper) {
    choice.hopper_unsupported_reason = hopper::unsupported_reason(operation);
    if (choice.hopper_unsupported_reason != nullptr) choice.path = Path::portable;
  }
  return choice;
}

}  // namespace anabranch::cuda
