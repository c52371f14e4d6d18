// core/cuda/copy_groups.cuh on the emulator.
#pragma once

#include <cstdint>

#include "emulator.h"

namespace anabranch::cuda {

inline void copy_async_16(uint32_t to, const void* source) { emulation::start_copy(to, source, 16, 16); }
inline void copy_async_16(uint32_t to, const void* source, bool condition) {
  emulation::start_copy(to, source, condition ? 16 : 0, 16);
}
template <int kBytes>
void copy_async(uint32_t to, const void* source, bool condition) {
  static_assert(kBytes == 4 || kBytes == 8);
  emulation::start_copy(to, source, condition ? kBytes : 0, kBytes);
}
inline void end_copy_group() { emulation::end_group(); }
template <int kPending>
void wait_for_copies() {
  emulation::wait_for_groups(kPending);
}

}  // namespace anabranch::cuda
