// How packed weights lie in memory: pieces of 16 bytes of a row, whose elements share a scale. A scale belongs to
// kScaleRows x kScaleElements elements of a matrix.
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/cuda/access.cuh"
#include "experts/cuda/ops/packed.h"
#include "experts/packed_value.h"

namespace anabranch::cuda {

struct Mxfp4Pieces {
  static constexpr int kElements = 32;  // per piece
  static constexpr int kScaleElements = static_cast<int>(kMxBlock);
  static constexpr int kScaleRows = 1;
};

struct Fp8Pieces {
  static constexpr int kElements = 16;
  static constexpr int kScaleElements = static_cast<int>(kScaleBlock);
  static constexpr int kScaleRows = static_cast<int>(kScaleBlock);

  // Returns the bits of the scale as a float32. bits: from load_scale().
  static __device__ __forceinline__ uint32_t scale_of(uint32_t bits, int32_t dtype) {
    return dtype == AB_FLOAT32    ? bits
           : dtype == AB_BFLOAT16 ? bits << 16
                                  : bits_of(e8m0_value(static_cast<uint8_t>(bits)));
  }
};

}  // namespace anabranch::cuda
