// Packed weights as operand B of a GEMM over rows: decoded by the producer warpgroup.
#pragma once

#include <type_traits>

#include "experts/hopper/operands.cuh"
#include "experts/hopper/packed_gather.cuh"

namespace anabranch::cuda::hopper {

// kDecoders: threads that decode.
template <class Shape, class Format, GateUpLayout kLayout, Major kMajor_, int kDecoders>
struct PackedOperand : PackedSource {
  static constexpr Major kMajor = kMajor_;
  static constexpr bool kGathered = true;
  static constexpr bool kPacked = true;
  static constexpr bool kMayHaveBias = false;
  static constexpr bool kMayHaveLowRank = false;
  static constexpr bool kScaled = false;

  template <int kColumns>
  using Gather = PackedGather<Format, kLayout, kColumns, Shape::kPackedBytes, kMajor, kDecoders>;

  __device__ void prefetch_maps() const {}
  template <int>
  __device__ static constexpr uint32_t bytes(const Tile&) {
    return 0;
  }
  template <int, class AnyMulticast>
  __device__ void load(uint32_t, Barrier&, const Tile&, int, const AnyMulticast&) const {}
};

template <class Shape, class Format, GateUpLayout kLayout, Major kMajor, int kDecoders>
struct BiasOf<PackedOperand<Shape, Format, kLayout, kMajor, kDecoders>> {
  using Operand = std::conditional_t<kLayout == GateUpLayout::gated, GatedWeightOperand<Major::mn>,
                                     WeightOperand<Major::mn, parts_of(kLayout)>>;
};

}  // namespace anabranch::cuda::hopper
