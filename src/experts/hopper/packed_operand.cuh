// Packed weights as operand B of a GEMM over rows: decoded by a producer warpgroup.
#pragma once

#include <cstdint>
#include <type_traits>

#include "experts/hopper/operands.cuh"
#include "experts/hopper/packed_gather.cuh"

namespace anabranch::cuda::hopper {

// Whether PackedTile64x128 is faster than PackedTile256x128 for R rows of E experts (measured, see
// docs/notes/packed_hopper.md). int32 counts the tiles: packed weights have fewer than 2^30 columns in all experts.
inline bool has_few_rows(int64_t R, int64_t E) { return R <= PackedTile64x128::kRows * E; }

template <class Shape, class Format, GateUpLayout kLayout, Major kMajor_>
struct PackedOperand : PackedSource {
  static constexpr Major kMajor = kMajor_;
  static constexpr bool kGathered = true;
  static constexpr bool kPacked = true;
  static constexpr bool kMayHaveBias = false;
  static constexpr bool kMayHaveLowRank = false;
  static constexpr bool kScaled = false;

  template <int kColumns, bool kAlsoCopies>
  using Gather = PackedGather<Format, kLayout, kColumns, Shape::kPackedBytes / Shape::kProducers, kMajor,
                              Shape::kProducers, !kAlsoCopies>;

  __device__ void prefetch_maps() const {}
  // What the other block of the cluster decodes and copies to this one.
  template <int kColumns>
  __device__ static uint32_t bytes(const Tile& tile) {
    return Shape::kBlocks > 1 && tile.multicasts_b != 0 ? kColumns / Shape::kBlocks * kSwizzleBytes : 0;
  }
  template <int, class AnyMulticast>
  __device__ void load(uint32_t, Barrier&, const Tile&, int, const AnyMulticast&) const {}
};

template <class Shape, class Format, GateUpLayout kLayout, Major kMajor>
struct BiasOf<PackedOperand<Shape, Format, kLayout, kMajor>> {
  using Operand = std::conditional_t<kLayout == GateUpLayout::gated, GatedWeightOperand<Major::mn>,
                                     WeightOperand<Major::mn, parts_of(kLayout)>>;
};

}  // namespace anabranch::cuda::hopper
