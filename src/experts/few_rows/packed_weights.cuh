// Packed weights of a small-M GEMM in the registers of one warp.
//
//   piece    16 bytes: kCodes consecutive k of a column
//   chunk    16 stored columns (8 of each part) x 128 k. Lanes 4 c, ..., 4 c + 3 hold the pieces of column c of each
//            part: lane i has the pieces i % 4, i % 4 + 4, ...
//   step     the next 8 k of each lane: two MMAs. The rows of x must be read in this order (row_slab.cuh)
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda/access.cuh"
#include "core/cuda/warp.cuh"
#include "experts/cuda/ops/packed.h"
#include "experts/cuda/ops/packed_words.cuh"

namespace anabranch::cuda::few_rows {

constexpr int kChunkDepth = 128;  // k of a chunk

// A format decodes the steps of a piece, given the factors of its scales:
//
//   kCodes         weights per piece
//   kApart         decode() returns k = i and i + 4 in word i, else 2 i and 2 i + 1
//   kScaledPieces  whether each piece has a scale, which is loaded with it
//   allows_fast()  whether the warp may decode with kFast; called by the whole warp
//
// MXFP4: a piece is one block.
struct Fp4Format {
  static constexpr int kCodes = 32;
  static constexpr bool kApart = true;
  static constexpr bool kScaledPieces = true;

  struct Scales {
    uint32_t bits[2];
  };
  struct Factors {
    uint32_t parts[2];  // pairs of bfloat16
  };

  // decode_codes_apart() yields 2^-126 times the values of codes. If no scale of the warp is 128 or more, one factor
  // restores both powers of 2: the fast way for bfloat16.
  template <class Element>
  static __device__ __forceinline__ bool allows_fast(const Scales& scales) {
    return !std::is_same_v<Element, BFloat16> || __any_sync(kAllLanes, (scales.bits[0] | scales.bits[1]) >= 128u) == 0;
  }

  template <class Element, bool kFast>
  static __device__ __forceinline__ Factors factors_of(const Scales& scales) {
    Factors factors;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint32_t scale = scales.bits[part];
      factors.parts[part] =
          kFast && std::is_same_v<Element, BFloat16> ? scale * 0x800080u + 0x3f003f00u : mx_factor(scale) * 0x10001u;
    }
    return factors;
  }

  template <class Element, bool kFast>
  static __device__ __forceinline__ EightElements decode(const uint4& piece, int step, const Factors& factors,
                                                         int part) {
    EightElements eight = decode_codes_apart(step == 0 ? piece.x : step == 1 ? piece.y : step == 2 ? piece.z : piece.w);
    const uint32_t factor = factors.parts[part];
#pragma unroll
    for (uint32_t& word : eight.words) {
      if constexpr (std::is_same_v<Element, BFloat16>) {
        if (!kFast) word = multiply_bfloat16(word, kTwoTo126);
        word = multiply_bfloat16(word, factor);
      } else {
        word = multiply_bfloat16(word, kTwoTo126);
        const float scale = high_half<BFloat16>(factor);
        word = pack<Element>(low_half<BFloat16>(word) * scale, high_half<BFloat16>(word) * scale);
      }
    }
    return eight;
  }
};

// FP8 blocks: a chunk of one part is in one block, because a part begins at a multiple of 128 columns.
struct Fp8Format {
  static constexpr int kCodes = 16;
  static constexpr bool kApart = false;
  static constexpr bool kScaledPieces = false;

  struct Scales {
    float parts[2];
  };
  using Factors = Scales;

  template <class Element>
  static __device__ __forceinline__ bool allows_fast(const Scales&) {
    return true;
  }
  template <class Element, bool kFast>
  static __device__ __forceinline__ Factors factors_of(const Scales& scales) {
    return scales;
  }
  template <class Element, bool kFast>
  static __device__ __forceinline__ EightElements decode(const uint4& piece, int step, const Factors& factors,
                                                         int part) {
    return step == 0 ? decode_e4m3<Element>(piece.x, piece.y, factors.parts[part])
                     : decode_e4m3<Element>(piece.z, piece.w, factors.parts[part]);
  }
};

// Loads 16 bytes at any address.
__device__ __forceinline__ uint4 load_bytes(const char* from) {
  const auto word = [&](int i) {
    uint32_t bytes = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) bytes |= uint32_t{static_cast<unsigned char>(from[4 * i + j])} << 8 * j;
    return bytes;
  };
  return {word(0), word(1), word(2), word(3)};
}

// A lane's share of a chunk.
template <class Format>
struct Chunk {
  static constexpr int kPieces = kChunkDepth / (4 * Format::kCodes);  // per part
  uint4 codes[2][kPieces] = {};
  typename Format::Scales scales = {};
};

// The columns of a lane in an expert's matrix: one of each part.
struct LaneColumns {
  int32_t expert;
  int32_t first;      // of part 0
  int32_t part_step;  // from there to that of part 1
};

// Loads the chunks of one warp's columns, every `stride`-th along k. Until begin() and after end() it loads nothing.
template <class Format, bool kAligned>
class WeightLoader {
 public:
  __device__ __forceinline__ void begin(const PackedMatrices& w, const LaneColumns& columns, int first_chunk) {
    const auto pieces = static_cast<uint32_t>(w.C) / Format::kCodes;  // per column
    const int64_t matrix = columns.expert * w.N * pieces;
    const int first = kChunkPieces * first_chunk + lane_index() % 4;
    codes_ = reinterpret_cast<const char*>(w.values) + matrix * 16;
    scales_ = static_cast<const char*>(w.scales) + matrix;
    piece_ = static_cast<uint32_t>(columns.first) * pieces + first;
    part_step_ = static_cast<uint32_t>(columns.part_step) * pieces;
    left_ = static_cast<int32_t>(pieces) - first;
  }

  __device__ __forceinline__ void end() { left_ = 0; }

  // Starts to load the next chunk, with its scales if the format has one per piece. In the last chunk of k MXFP4 may
  // have pieces past the end: they keep their codes and have the scale 0, so that they are finite.
  __device__ __forceinline__ void load(int stride, Chunk<Format>* chunk) {
    const bool valid = left_ > 0;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint32_t piece = part == 0 ? piece_ : piece_ + part_step_;
      const char* const from = codes_ + uint64_t{piece} * 16;
#pragma unroll
      for (int i = 0; i < Chunk<Format>::kPieces; ++i) {
        if constexpr (kAligned) {
          load_streaming_if(valid, from + i * 64, &chunk->codes[part][i]);
        } else if (valid) {
          chunk->codes[part][i] = load_bytes(from + i * 64);
        }
      }
      if constexpr (Format::kScaledPieces) {
        chunk->scales.bits[part] = 0;
        load_if<1>(valid, scales_ + piece, &chunk->scales.bits[part]);
      }
    }
    piece_ += kChunkPieces * stride;
    left_ = max(left_ - kChunkPieces * stride, 0);
  }

 private:
  static constexpr int kChunkPieces = 4 * Chunk<Format>::kPieces;

  const char* codes_ = nullptr;  // of the expert
  const char* scales_ = nullptr;
  uint32_t piece_ = 0;  // of the lane in part 0, counted from codes_
  uint32_t part_step_ = 0;
  int32_t left_ = 0;  // pieces of the column from the lane's first on
};

// The scales of FP8 blocks. Lane i holds those of the i-th of 32 blocks along k, one of each part. All columns of the
// warp in a part must be in one block.
class BlockScales {
 public:
  __device__ __forceinline__ void load(const PackedMatrices& w, const LaneColumns& columns, int first) {
    first_ = first;
    constexpr auto kBlock = static_cast<int32_t>(kScaleBlock);
    const auto blocks = static_cast<int32_t>(w.C / kScaleBlock);  // of a column
    const int block = min(first + lane_index(), blocks - 1);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int64_t row = (columns.expert * w.N + columns.first + part * columns.part_step) / kBlock;
      scales_[part] = block_scale(w.scales, w.scales_dtype, row * blocks + block);
    }
  }
  __device__ __forceinline__ bool has(int block) const { return block / kWarp == first_ / kWarp; }
  __device__ __forceinline__ float of(int part, int block) const {
    return __shfl_sync(kAllLanes, scales_[part], block % kWarp);
  }

 private:
  int first_ = 0;
  float scales_[2];
};

}  // namespace anabranch::cuda::few_rows
