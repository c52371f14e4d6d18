// Which kernels an operation of the experts runs on: the first path that can take it.
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/cuda/device.h"
#include "experts/hopper/products.h"
#include "experts/portable/products.h"

namespace anabranch::cuda {

// In the order in which they are tried.
enum class Path : int32_t {
  hopper,    // wgmma, on compute capability 9.0
  portable,  // mma.sync, everywhere
  plain      // multiply-adds: one size fits all, slowly
};
const char* name_of(Path path);

// The first that may be taken: `hopper`, unless ANABRANCH_CUDA_PATH names another one.
Path first_path();

// The current device, for an operation of the experts; unsupported where that variable was not understood, too.
ab_status find_device_of_experts(const char* operation, Device* device);

struct PathChoice {
  Path path = Path::plain;
  const char* why_not_hopper = nullptr;    // where it is another one
  const char* why_not_portable = nullptr;  // where it is the plain one
};

// Of a device, before an operation's shapes and dtypes are known.
PathChoice choose_path(const Device& device);

template <class Operation>
PathChoice choose_path(const Operation& operation, const Device& device) {
  PathChoice choice = choose_path(device);
  if (choice.why_not_hopper == nullptr) choice.why_not_hopper = hopper::why_not(operation);
  if (choice.why_not_hopper == nullptr) return {Path::hopper};
  if (choice.why_not_portable == nullptr) choice.why_not_portable = portable::why_not(operation);
  choice.path = choice.why_not_portable == nullptr ? Path::portable : Path::plain;
  return choice;
}

}  // namespace anabranch::cuda
