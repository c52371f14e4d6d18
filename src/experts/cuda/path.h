// Which kernels an operation of the experts runs on: those of the first path that can take it.
#pragma once

#include "core/cuda/path.h"
#include "experts/hopper/products.h"
#include "experts/portable/products.h"

namespace anabranch::cuda {

template <class Operation>
PathChoice choose_path(const Operation& operation, const Device& device) {
  PathChoice choice = first_path(device);
  if (choice.path == Path::hopper) {
    choice.why_not_hopper = hopper::why_not(operation);
    if (choice.why_not_hopper != nullptr) choice.path = Path::portable;
  }
  if (choice.path == Path::portable) {
    choice.why_not_portable = portable::why_not(operation);
    if (choice.why_not_portable != nullptr) choice.path = Path::plain;
  }
  return choice;
}

}  // namespace anabranch::cuda
