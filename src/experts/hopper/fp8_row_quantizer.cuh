// Rows of an epilogue in which a lane has 8 neighbours of every 32 columns, also as float8_e4m3fn.
#pragma once

#include "core/cuda/access.cuh"
#include "core/cuda/warp.cuh"
#include "experts/cuda/ops/fp8.cuh"

namespace anabranch::cuda::hopper {

// Of epilogues whose results have no other form.
struct QuantizesNothing {
  template <class Word>
  __device__ void keep(float*, int, bool, const Word&) const {}
};

// [R, kParts, F] with a scale for every 128 columns of a part, of rows that are rounded to Element.
template <class Element, int kParts>
struct Fp8RowQuantizer {
  uint8_t* values;  // or nullptr
  float* scales;    // [R, kParts, F / 128]
  int32_t columns;  // F
  bool power_of_two;

  static constexpr int kBlocks = 4;  // of 32 columns
  static constexpr int kWords = 4;   // of 8 columns

  // Words of two columns stay where a block's accumulators were, 16 of them: those of the upper row, gate and up, then
  // those of the lower one. word(part, i): of columns 2 i and 2 i + 1 of the lane's in the block.
  template <class Word>
  __device__ __forceinline__ void keep(float* block, int half, bool real, const Word& word) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) block[place_of(half, part, i)] = float_from_bits(real ? word(part, i) : 0u);
    }
  }

  // kept: of 4 blocks; row: of the upper one, the other one is 8 below; column: the first of the 128.
  __device__ __forceinline__ void write(const float* kept, int32_t row, int32_t column, const bool (&there)[2]) const {
    if (values == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const auto word_of = [&](int block, int i) { return bits_of(kept[block * 16 + place_of(half, part, i)]); };
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < kBlocks * kWords; ++i) {
          const uint32_t word = word_of(i / kWords, i % kWords);
          largest =
              max(largest, max(magnitude_bits(low_half<Element>(word)), magnitude_bits(high_half<Element>(word))));
        }
        largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        const Fp8Scaler scaler(largest, power_of_two);
        if (!there[half]) continue;
        const int64_t first = (int64_t{row + half * 8} * kParts + part) * columns + column;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          uint32_t of_four[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t low = word_of(block, 2 * i);
            const uint32_t high = word_of(block, 2 * i + 1);
            of_four[i] = scaler.pack(low_half<Element>(low), high_half<Element>(low)) |
                         scaler.pack(low_half<Element>(high), high_half<Element>(high)) << 16;
          }
          *reinterpret_cast<uint2*>(values + first + block * 32 + lane_index() % 4 * 8) = {of_four[0], of_four[1]};
        }
        if (lane_index() % 4 == 0) scales[first / 128] = scaler.scale();
      }
    }
  }

 private:
  static __device__ constexpr int place_of(int half, int part, int i) { return (half * kParts + part) * kWords + i; }
};

}  // namespace anabranch::cuda::hopper
