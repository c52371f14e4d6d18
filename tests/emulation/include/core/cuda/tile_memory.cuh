// core/cuda/tile_memory.cuh on the emulator, without wgmma and matrix stores.
#pragma once

#include <cstdint>

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/shared.cuh"

namespace anabranch::cuda {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulation::shared_memory());
}

constexpr int kSwizzleBytes = 128;

inline void fence_async_proxy() {}

constexpr uint32_t swizzled(uint32_t row, uint32_t chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
constexpr uint32_t advance_chunks(uint32_t address, uint32_t chunks) { return address ^ chunks << 4; }

inline void store_shared(uint32_t address, float a, float b) {
  struct alignas(8) Both {
    float a, b;
  };
  store_shared(address, Both{a, b});
}

}  // namespace anabranch::cuda
