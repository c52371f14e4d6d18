// core/cuda/tile_memory.cuh on the emulator, without the Hopper-only parts.
#pragma once

#include <cstdint>

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/shared.cuh"

namespace anabranch::cuda {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulation::shared_memory());
}

inline void store_shared(uint32_t address, float a, float b) {
  struct alignas(8) Both {
    float a, b;
  };
  store_shared(address, Both{a, b});
}

}  // namespace anabranch::cuda
