// Panels of 64 x 64 elements of 16 bits in shared memory: 64 rows of 128 bytes with the 128-byte swizzle, as TMA writes
// them and wgmma reads them.
//
//   Major::k   a row holds 64 elements along k of one row of A (column of B)
//   Major::mn  a row holds one element along k of 64 rows of A (columns of B)
#pragma once

#include "core/cuda/tile_memory.cuh"

namespace anabranch::cuda {

constexpr int kPanel = 64;
constexpr int kPanelBytes = kPanel * kSwizzleBytes;

}  // namespace anabranch::cuda
