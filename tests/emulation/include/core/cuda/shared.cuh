// core/cuda/shared.cuh on the emulator.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulator.h"

namespace anabranch::cuda {

// Checks the alignment and bounds of a shared-memory access and returns its host address.
inline char* shared_place(uint32_t address, size_t bytes) {
  if (address % bytes != 0) emulation::fail("an access of %zu bytes to the unaligned address %u", bytes, address);
  if (address + bytes > emulation::shared_bytes()) emulation::fail("an access past the block's shared memory");
  return emulation::shared_memory() + address;
}

template <class T>
T load_shared(unsigned address) {
  T value;
  std::memcpy(&value, shared_place(address, sizeof(T)), sizeof(T));
  return value;
}
template <class T>
void store_shared(unsigned address, T value) {
  std::memcpy(shared_place(address, sizeof(T)), &value, sizeof(T));
}

inline void store_shared_if(bool condition, unsigned address, uint32_t value) {
  if (condition) store_shared(address, value);
}
inline void add_shared(unsigned address, uint32_t value) {
  store_shared(address, load_shared<uint32_t>(address) + value);
}
inline void increment_shared_if(bool condition, unsigned address) {
  if (condition) add_shared(address, 1);
}
inline void or_shared(unsigned address, uint32_t bits) { store_shared(address, load_shared<uint32_t>(address) | bits); }

}  // namespace anabranch::cuda
