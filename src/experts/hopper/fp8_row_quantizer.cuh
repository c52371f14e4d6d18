// Quantises rows to e4m3 in an epilogue whose lanes each hold 8 adjacent columns of every 32.
#pragma once

#include "core/cuda/access.cuh"
#include "core/cuda/warp.cuh"
#include "experts/cuda/ops/fp8.cuh"

namespace anabranch::cuda::hopper {

// The quantiser of epilogues without FP8 results.
struct NoQuantizer {
  template <class Word>
  __device__ void save(float*, int, bool, const Word&) const {}
};

// Writes [R, kParts, F] and one scale per 128 columns of a part. The rows have been rounded to Element.
template <class Element, int kParts>
struct Fp8RowQuantizer {
  uint8_t* values;  // or nullptr
  float* scales;    // [R, kParts, F / 128]
  int32_t columns;  // F
  bool power_of_two;

  static constexpr int kBlocks = 4;  // of 32 columns each
  static constexpr int kWords = 4;   // of two columns each, per lane and block

  // Saves the packed words in place of a block's 16 accumulators: the words of the upper row (gate, up), then those of
  // the lower row. word(part, i): the lane's columns 2 i and 2 i + 1 in the block.
  template <class Word>
  __device__ __forceinline__ void save(float* block, int half, bool real, const Word& word) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) block[place_of(half, part, i)] = float_from_bits(real ? word(part, i) : 0u);
    }
  }

  // saved: the words of 4 blocks. row: the upper row; the lower one is 8 rows below. column: the first of the 128
  // columns.
  __device__ __forceinline__ void write(const float* saved, int32_t row, int32_t column,
                                        const bool (&in_bounds)[2]) const {
    if (values == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const auto word_of = [&](int block, int i) { return bits_of(saved[block * 16 + place_of(half, part, i)]); };
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
        if (!in_bounds[half]) continue;
        const int64_t first = (int64_t{row + half * 8} * kParts + part) * columns + column;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          uint32_t words[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t low = word_of(block, 2 * i);
            const uint32_t high = word_of(block, 2 * i + 1);
            words[i] = scaler.pack(low_half<Element>(low), high_half<Element>(low)) |
                       scaler.pack(low_half<Element>(high), high_half<Element>(high)) << 16;
          }
          *reinterpret_cast<uint2*>(values + first + block * 32 + lane_index() % 4 * 8) = {words[0], words[1]};
        }
        if (lane_index() % 4 == 0) scales[first / 128] = scaler.scale();
      }
    }
  }

 private:
  static __device__ constexpr int place_of(int half, int part, int i) { return (half * kParts + part) * kWords + i; }
};

}  // namespace anabranch::cuda::hopper
