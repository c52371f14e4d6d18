// The formats of packed weights: how a thread loads scales, and decodes a piece to bfloat16.
//
//   Scale         a scale on its way from memory
//   load_scale()  starts to load it if it is valid; else it is zero
//   scale_of()    its bits, as decode() takes them; waits for the load
//   kAlwaysFast   whether decode<true>() is right for all scales; else is_fast() tells for those of a warp
//   decode()      calls store(i, elements) for the i-th eight elements of a piece
#pragma once

#include <cstdint>

#include "anabranch/types.h"
#include "core/cuda/access.cuh"
#include "core/cuda/warp.cuh"
#include "experts/cuda/ops/packed_pieces.cuh"
#include "experts/cuda/ops/packed_words.cuh"

namespace anabranch::cuda::hopper {

struct Mxfp4 : Mxfp4Pieces {
  static constexpr bool kAlwaysFast = false;

  struct Scale {
    uint32_t bits = 0;
  };
  static __device__ __forceinline__ Scale load_scale(bool valid, const char* at, int32_t) {
    Scale scale;
    load_if<1>(valid, at, &scale.bits);
    return scale;
  }
  static __device__ __forceinline__ uint32_t scale_of(const Scale& scale, int32_t) { return scale.bits; }

  // decode_codes() yields 2^-126 times the values of codes. If no scale of the warp is 128 or more, one factor restores
  // both powers of 2.
  template <int kScales>
  static __device__ __forceinline__ bool is_fast(const uint32_t (&scales)[kScales]) {
    uint32_t bits = 0;
#pragma unroll
    for (const uint32_t scale : scales) bits |= scale;
    return __any_sync(kAllLanes, bits >= 128u) == 0;
  }

  template <bool kFast, class Store>
  static __device__ __forceinline__ void decode(const uint4& piece, uint32_t scale, const Store& store) {
    const uint32_t factors = kFast ? scale * 0x800080u + 0x3f003f00u : mx_factor(scale) * 0x10001u;
    const uint32_t codes[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      EightElements eight = decode_codes(codes[i]);
      if constexpr (!kFast) {
#pragma unroll
        for (uint32_t& word : eight.words) word = multiply_bfloat16(word, kTwoTo126);
      }
#pragma unroll
      for (uint32_t& word : eight.words) word = multiply_bfloat16(word, factors);
      store(i, eight);
    }
  }
};

struct Fp8Blocks : Fp8Pieces {
  static constexpr bool kAlwaysFast = true;

  // A scale has 1, 2 or 4 bytes: float8_e8m0, bfloat16 or float32. Three predicated loads, of which one runs, take less
  // time than branches; each has a register of its own, so that none waits for another.
  struct Scale {
    uint32_t e8m0 = 0;
    uint32_t bfloat16 = 0;
    uint32_t float32 = 0;
  };
  static __device__ __forceinline__ Scale load_scale(bool valid, const char* at, int32_t bytes) {
    Scale scale;
    load_if<4>(valid && bytes == 4, at, &scale.float32);
    load_if<2>(valid && bytes == 2, at, &scale.bfloat16);
    load_if<1>(valid && bytes == 1, at, &scale.e8m0);
    return scale;
  }
  static __device__ __forceinline__ uint32_t scale_of(const Scale& scale, int32_t bytes) {
    if (bytes == 1) return Fp8Pieces::scale_of(scale.e8m0, AB_FLOAT8_E8M0);
    return scale.float32 | scale.bfloat16 << 16;
  }

  template <bool kFast, class Store>
  static __device__ __forceinline__ void decode(const uint4& piece, uint32_t scale, const Store& store) {
    store(0, decode_e4m3<BFloat16>(piece.x, piece.y, float_from_bits(scale)));
    store(1, decode_e4m3<BFloat16>(piece.z, piece.w, float_from_bits(scale)));
  }
};

}  // namespace anabranch::cuda::hopper
