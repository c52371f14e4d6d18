// Packed weights on their way into the stages of Hopper's GEMMs: every element has its value and its place, whenever
// copies arrive.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/cuda/launch.h"
#include "core/cuda/panel.cuh"
#include "core/dtype.h"
#include "core/floats.h"
#include "experts/hopper/packed_gather.cuh"
#include "packed_operands.h"

namespace anabranch::testing {
namespace {

using namespace anabranch::cuda;
using namespace anabranch::cuda::hopper;

// How a GEMM decodes: constants of its tile shape (tile_shape.cuh, which needs wgmma).
template <int kColumns_, int kMemoryBytes_, int kPortions_, bool kLoadsEarly_>
struct Way {
  static constexpr int kColumns = kColumns_;
  static constexpr int kMemoryBytes = kMemoryBytes_;  // of a warpgroup
  static constexpr int kStageBytes = kColumns * kSwizzleBytes;
  static constexpr int kPortions = kPortions_;
  static constexpr bool kLoadsEarly = kLoadsEarly_;
};
using OfHalf = Way<128, 8 << 10, 2, true>;
using OfHalfAndRows = Way<128, 8 << 10, 2, false>;
using OfGradient = Way<256, 48 << 10, 1, false>;

// Writes tiles [count, kColumns, k] in bfloat16. Each block writes the portion that it decodes.
template <class Way, class Format, GateUpLayout kLayout, Major kMajor>
__global__ void decode_tiles(const PackedSource source, const Tile* const tiles, const int count, uint16_t* const to,
                             const int k) {
  constexpr int kColumns = Way::kColumns;
  const auto stage = static_cast<uint32_t>(Way::kMemoryBytes);
  for (int n = 0; n < count; ++n) {
    const int portion = static_cast<int>(blockIdx.x);
    PackedGather<Format, kLayout, kColumns, Way::kMemoryBytes, kMajor, Way::kPortions, Way::kLoadsEarly> gather(
        source, tiles[n], 0, portion);
    const int first = portion * (kColumns / Way::kPortions);
    const int end = first + kColumns / Way::kPortions;
    for (int k_block = 0; k_block < tiles[n].k_blocks; ++k_block) {
      gather.copy(stage, tiles[n], k_block);
      gather.end_copy(tiles[n], k_block);
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < kColumns * kBlockK; i += kWarpgroup) {
        const int column = i / kBlockK;
        if (column < first || column >= end) continue;
        const int element = i % kBlockK;
        // k-major: rows of one column. mn-major: panels of 64 columns, with rows of one k.
        const int row = kMajor == Major::k ? column : column / kBlockK * kBlockK + element;
        const int place = kMajor == Major::k ? element : column % kBlockK;
        to[(int64_t{n} * kColumns + column) * k + k_block * kBlockK + element] = load_shared<uint16_t>(
            stage + swizzled(static_cast<uint32_t>(row), static_cast<uint32_t>(place) / 8) + place % 8 * 2);
      }
      __syncthreads();
    }
  }
}

// columns: of a window from `first` on, or of the gate.
template <class Way, class Format, GateUpLayout kLayout, Major kMajor = Major::k>
void check(const PackedTensor& packed, int64_t first, int64_t columns) {
  constexpr int kColumns = Way::kColumns;
  constexpr int kScale = kLayout == GateUpLayout::interleaved ? 2 : 1;
  constexpr int kParts = kLayout == GateUpLayout::gated ? 2 : 1;
  const auto sum = static_cast<int32_t>(kMajor == Major::k ? packed.C : packed.N);  // its length
  const auto k_blocks = static_cast<int32_t>((sum + kBlockK - 1) / kBlockK);
  const int k = k_blocks * kBlockK;
  std::vector<Tile> tiles;
  for (int32_t expert = 0; expert < packed.M; ++expert) {
    constexpr int kStep = kColumns / kParts / kScale;
    // The last tile is beyond the last column.
    for (int32_t column = 0; column < columns / kScale + kStep; column += kStep) {
      tiles.push_back({.expert = expert, .column = column, .end_k = sum, .k_blocks = k_blocks});
      tiles.push_back({.expert = kNoExpert, .column = column});
    }
  }
  const PackedMatrices matrices{
      packed.values.values().data(), packed.scales_data(), packed.dtype, packed.scales_dtype, packed.N, packed.C};
  const PackedSource source =
      packed_source<Format, kLayout, kColumns, kMajor, Way::kPortions>(matrices, first, columns);
  for (const auto copies : {emulation::Copies::early, emulation::Copies::late}) {
    emulation::set_options({emulation::Order::shuffled, copies});
    std::vector<uint16_t> got(tiles.size() * kColumns * static_cast<size_t>(k), 0x7fc1);
    ASSERT_EQ(launch("decode", decode_tiles<Way, Format, kLayout, kMajor>,
                     {Way::kPortions, kWarpgroup, Way::kMemoryBytes + Way::kStageBytes, nullptr}, source, tiles.data(),
                     static_cast<int>(tiles.size()), got.data(), k)
                  .code,
              AB_OK);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (size_t n = 0; n < tiles.size(); n += 2) {
      for (int64_t i = 0; i < int64_t{kColumns} * k; ++i) {
        const int64_t in_tile = i / k;
        const int64_t in_part = kScale * tiles[n].column + in_tile % (kColumns / kParts);
        const int64_t column = first + in_part + in_tile / (kColumns / kParts) * columns;
        float want = 0;
        if (in_part < columns && i % k < sum) {
          const int64_t row = kMajor == Major::k ? column : i % k;
          const int64_t element = kMajor == Major::k ? i % k : column;
          want = packed.value((tiles[n].expert * packed.N + row) * packed.C + element);
        }
        const uint16_t bits = got[n * kColumns * static_cast<size_t>(k) + static_cast<size_t>(i)];
        const BFloat16 rounded = from_float<BFloat16>(want);
        const bool both_nan = std::isnan(want) && std::isnan(to_float(BFloat16{bits}));
        ASSERT_TRUE(bits == rounded.bits || both_nan)
            << "tile " << n << " column " << in_tile << " k " << i % k << " " << bits << " " << want;
      }
    }
  }
}

// All codes with all scales.
void fill(PackedTensor* packed) {
  for (int64_t i = 0; i < packed->values.size(); ++i) packed->values[i] = static_cast<uint8_t>(i * 7 + i / 256);
  for (int64_t i = 0; i < packed->byte_scales.size(); ++i)
    packed->byte_scales[i] = static_cast<uint8_t>(i * 5 + i / 256);
}

TEST(PackedGathers, DecodeMxfp4) {
  for (const int64_t C : {32, 64, 480}) {
    PackedTensor packed(2, 320, C, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 1);
    check<OfHalf, Mxfp4, GateUpLayout::ungated>(packed, 40, 264);  // scales below 128 only
    fill(&packed);
    check<OfHalf, Mxfp4, GateUpLayout::ungated>(packed, 0, 320);
    check<OfHalf, Mxfp4, GateUpLayout::gated>(packed, 0, 160);
    check<OfHalfAndRows, Mxfp4, GateUpLayout::gated>(packed, 0, 160);
    check<OfHalf, Mxfp4, GateUpLayout::interleaved>(packed, 0, 320);
  }
  for (const uint8_t scale : {0, 1, 127, 128, 130, 254, 255}) {
    PackedTensor packed(1, 64, 32, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 1);
    fill(&packed);
    for (int64_t i = 0; i < packed.byte_scales.size(); ++i) packed.byte_scales[i] = scale;
    check<OfHalf, Mxfp4, GateUpLayout::ungated>(packed, 0, 64);
  }
}

TEST(PackedGathers, DecodeTransposedMxfp4) {
  for (const int64_t N : {8, 64, 456}) {
    PackedTensor packed(2, N, 416, AB_FLOAT4_E2M1X2, AB_FLOAT8_E8M0, 1);
    check<OfHalf, Mxfp4, GateUpLayout::ungated, Major::mn>(packed, 32, 320);
    fill(&packed);
    check<OfHalf, Mxfp4, GateUpLayout::ungated, Major::mn>(packed, 0, 416);
    check<OfGradient, Mxfp4, GateUpLayout::ungated, Major::mn>(packed, 0, 416);
  }
}

TEST(PackedGathers, DecodeFp8Blocks) {
  for (const int32_t scales : {AB_FLOAT32, AB_BFLOAT16, AB_UINT8}) {
    for (const int64_t C : {128, 640}) {
      PackedTensor packed(2, 512, C, AB_FLOAT8_E4M3, scales, 2);
      fill(&packed);
      check<OfHalf, Fp8Blocks, GateUpLayout::ungated>(packed, 128, 384);
      check<OfHalf, Fp8Blocks, GateUpLayout::gated>(packed, 0, 256);
      check<OfHalfAndRows, Fp8Blocks, GateUpLayout::gated>(packed, 0, 256);
      if (C != 640) continue;
      check<OfHalf, Fp8Blocks, GateUpLayout::ungated, Major::mn>(packed, 128, 512);
      check<OfGradient, Fp8Blocks, GateUpLayout::ungated, Major::mn>(packed, 128, 512);
    }
  }
}

}  // namespace
}  // namespace anabranch::testing
