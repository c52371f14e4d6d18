// core/cuda/dynamic_memory.cuh on the emulator.
#pragma once

#include "emulator.h"

namespace anabranch::cuda {

template <class T>
T* dynamic_shared_array() {
  return reinterpret_cast<T*>(emulation::shared_memory());
}

template <class T>
T& dynamic_shared_memory() {
  if (sizeof(T) > emulation::shared_bytes())
    emulation::fail("the launch requests less shared memory than the kernel uses");
  return *dynamic_shared_array<T>();
}

}  // namespace anabranch::cuda
