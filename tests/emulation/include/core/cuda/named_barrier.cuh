// core/cuda/named_barrier.cuh on the emulator.
#pragma once

#include "core/cuda/warp.cuh"
#include "emulator.h"

namespace anabranch::cuda {

inline void sync_some_warps(int barrier, int warps) { emulation::sync_threads(barrier, warps * kWarp); }

}  // namespace anabranch::cuda
