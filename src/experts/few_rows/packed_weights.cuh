// Packed weights of a small-M GEMM on their way from device memory through shared memory to the registers of mma.sync.
//
//   chunk    16 stored columns (8 of each part) x 128 k, for one warp: 1 KiB of MXFP4 or 2 KiB of e4m3
//   piece    16 bytes of a column. The order of a column's pieces in shared memory depends on the column, so that
//            neither copies nor reads have bank conflicts
//
// In a step of 32 k a lane gets 8 consecutive k of one column of each part, like a lane that reads 16-bit weights.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/warp.cuh"
#include "experts/cuda/ops/packed.h"
#include "experts/cuda/ops/packed_words.cuh"

namespace anabranch::cuda::few_rows {

constexpr int kChunkSteps = 4;

// A lane's weights of one step: elements k, ..., k + 7 of a column.
using LaneWeights = EightElements;

// A lane's columns of a unit: one of each part. All columns of all experts are numbered, in stored order.
struct LaneColumns {
  int32_t first = 0;      // of part 0
  int32_t part_step = 0;  // from there to that of part 1
};

// Copies 16 bytes if the condition holds. kAligned: to 16 bytes.
template <bool kAligned>
__device__ __forceinline__ void copy_piece(char* to, const uint8_t* from, bool condition) {
  if constexpr (kAligned) {
    copy_async_16(static_cast<uint32_t>(__cvta_generic_to_shared(to)), from, condition);
  } else {
#pragma unroll 1
    for (int i = 0; condition && i < 16; ++i) to[i] = static_cast<char>(from[i]);
  }
}

// MXFP4: a block of 32 elements of a column is one piece and belongs to one step.
struct Fp4Format {
  static constexpr int kStages = 4;
  static constexpr int kColumnBytes = 64;  // per chunk

  // A lane holds the scales of step lane % 4, of its columns of both parts.
  struct Scales {
    uint32_t parts[2];
  };

  // Where the lane's codes and scales are. Chunks are counted from the one that it was made for.
  struct Source {
    const uint8_t* codes[2];
    const uint8_t* scales[2];

    __device__ __forceinline__ Source(const PackedMatrices& w, const LaneColumns& columns, int chunk) {
      const int step = lane_index() % 4;
      const int64_t blocks = w.C / kMxBlock;  // per column
      const int64_t first = columns.first * blocks + chunk * kChunkSteps + step;
      codes[0] = w.values + first * 16;
      codes[1] = codes[0] + columns.part_step * blocks * 16;
      scales[0] = static_cast<const uint8_t*>(w.scales) + first;
      scales[1] = scales[0] + columns.part_step * blocks;
    }
    __device__ __forceinline__ void advance() {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        codes[part] += kColumnBytes;
        scales[part] += kChunkSteps;
      }
    }
  };

  // is_valid(step): whether a step of the chunk, 0 to 3, belongs to the warp.
  template <class IsValid>
  static __device__ __forceinline__ Scales load_scales(const Source& source, int chunk, const IsValid& is_valid) {
    const int first = chunk * kChunkSteps;
    if (!is_valid(lane_index() % 4)) return {};
    return {source.scales[0][first], source.scales[1][first]};
  }

  // Starts the copies of the lane's pieces. to: the lane's column of part 0; column: its number, 0 to 7.
  template <bool kAligned, class IsValid>
  static __device__ __forceinline__ void copy(const Source& source, int chunk, char* to, int column,
                                              const IsValid& is_valid) {
    const int step = lane_index() % 4;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      copy_piece<kAligned>(to + part * 8 * kColumnBytes + (step ^ column / 2) * 16,
                           source.codes[part] + chunk * kColumnBytes, is_valid(step));
    }
  }

  // decode_codes() yields 2^-126 times the values of codes. If no scale of the warp is 128 or more, one factor restores
  // both powers of 2: the fast way for bfloat16.
  template <class Element>
  static __device__ __forceinline__ bool allows_fast(const Scales& scales) {
    return !std::is_same_v<Element, BFloat16> ||
           __any_sync(kAllLanes, (scales.parts[0] | scales.parts[1]) >= 128u) == 0;
  }

  // The factors of the lane's scales, as bfloat16.
  template <class Element, bool kFast>
  static __device__ __forceinline__ uint32_t factors_of(const PackedMatrices& /*w*/, const Source& /*source*/,
                                                        const Scales& scales) {
    if constexpr (kFast && std::is_same_v<Element, BFloat16>) {  // 2^(scale - 1)
      return scales.parts[0] * 0x80u + scales.parts[1] * 0x800000u + 0x3f003f00u;
    }
    return mx_factor(scales.parts[0]) | mx_factor(scales.parts[1]) << 16;
  }

  // chunk: the lane's column of part 0 in shared memory.
  template <class Element, bool kFast>
  static __device__ __forceinline__ void load(const char* chunk, int column, int step, uint32_t factors,
                                              LaneWeights (&w)[2]) {
    const uint32_t of_step = __shfl_sync(kAllLanes, factors, step, 4);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const char* const piece = chunk + part * 8 * kColumnBytes + (step ^ column / 2) * 16;
      w[part] = decode_codes(*reinterpret_cast<const uint32_t*>(piece + lane_index() % 4 * 4));
      const uint32_t factor = part == 0 ? select_bytes<0x1010>(of_step, 0) : select_bytes<0x3232>(of_step, 0);
#pragma unroll
      for (uint32_t& word : w[part].words) {
        if constexpr (std::is_same_v<Element, BFloat16>) {
          if (!kFast) word = multiply_bfloat16(word, kTwoTo126);
          word = multiply_bfloat16(word, factor);
        } else {
          word = multiply_bfloat16(word, kTwoTo126);
          const float scale = high_half<BFloat16>(factor);
          word = pack<Element>(low_half<BFloat16>(word) * scale, high_half<BFloat16>(word) * scale);
        }
      }
    }
  }
};

// FP8 blocks: a step has two pieces of a column, a chunk one scale per part.
struct Fp8Format {
  static constexpr int kStages = 2;
  static constexpr int kColumnBytes = 128;

  struct Scales {};  // nothing is loaded ahead: a line of the L1 cache serves many chunks

  struct Source {
    const uint8_t* codes[2];
    int64_t scales[2];  // indices

    __device__ __forceinline__ Source(const PackedMatrices& w, const LaneColumns& columns, int chunk) {
      constexpr auto kColumns = static_cast<int32_t>(kScaleBlock);
      const int64_t blocks = w.C / kScaleBlock;  // per column
      codes[0] = w.values + columns.first * w.C + chunk * kColumnBytes;
      codes[1] = codes[0] + columns.part_step * w.C;
      // A part begins at a multiple of 128 columns, and 16 columns of one part are in one block.
      scales[0] = columns.first / kColumns * blocks + chunk;
      scales[1] = scales[0] + columns.part_step / kColumns * blocks;
    }
    __device__ __forceinline__ void advance() {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        codes[part] += kColumnBytes;
        ++scales[part];
      }
    }
  };

  template <class IsValid>
  static __device__ __forceinline__ Scales load_scales(const Source& /*source*/, int /*chunk*/,
                                                       const IsValid& /*is_valid*/) {
    return {};
  }

  template <bool kAligned, class IsValid>
  static __device__ __forceinline__ void copy(const Source& source, int chunk, char* to, int column,
                                              const IsValid& is_valid) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int piece = lane_index() % 4 + 4 * (i ^ column % 2);
        copy_piece<kAligned>(to + part * 8 * kColumnBytes + (piece ^ column % 4 * 2) * 16,
                             source.codes[part] + chunk * kColumnBytes + piece * 16, is_valid(piece / 2));
      }
    }
  }

  template <class Element>
  static __device__ __forceinline__ bool allows_fast(const Scales& /*scales*/) {
    return true;
  }

  // The scales of both parts.
  template <class Element, bool kFast>
  static __device__ __forceinline__ FloatPair factors_of(const PackedMatrices& w, const Source& source,
                                                         const Scales& /*scales*/) {
    const auto scale = [&](int64_t i) { return block_scale(w.scales, w.scales_dtype, i); };
    return {scale(source.scales[0]), scale(source.scales[1])};
  }

  template <class Element, bool kFast>
  static __device__ __forceinline__ void load(const char* chunk, int column, int step, const FloatPair& factors,
                                              LaneWeights (&w)[2]) {
    const int lane = lane_index() % 4;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int piece = (2 * step + lane / 2) ^ column % 4 * 2;
      const auto codes = *reinterpret_cast<const uint2*>(chunk + part * 8 * kColumnBytes + piece * 16 + lane % 2 * 8);
      w[part] = decode_e4m3<Element>(codes.x, codes.y, part == 0 ? factors.x : factors.y);
    }
  }
};

}  // namespace anabranch::cuda::few_rows
