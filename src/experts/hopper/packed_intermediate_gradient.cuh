// Launches the gradient of the intermediate rows with packed weights.
#pragma once

#include "experts/hopper/intermediate_gradient.cuh"
#include "experts/hopper/packed_operand.cuh"

namespace anabranch::cuda::hopper {

// W_out [E, D, F]: k is the rows of D.
template <class Format>
using PackedIntermediateGradientWeights = PackedOperand<PackedTile128x256, Format, GateUpLayout::ungated, Major::mn>;

template <class Format>
ab_status prepare_intermediate_gradient_weights(const PackedIntermediateGradient& g,
                                                PackedIntermediateGradientWeights<Format>* weights) {
  using Shape = PackedTile128x256;
  static_cast<PackedSource&>(*weights) =
      packed_source<Format, GateUpLayout::ungated, Shape::kColumns, Major::mn, Shape::kBlocks>(g.packed, 0, g.s.F);
  return ok();
}

// Rows that are not gathered are read through the identity map, as by the GEMM of plain weights in this layout.
template <class Format, GateUpLayout kLayout>
ab_status launch_packed_intermediate_gradient(const PackedIntermediateGradient& g, int multiprocessors,
                                              cudaStream_t stream) {
  return launch_intermediate_gradient<PackedTile128x256, BFloat16, GatheredRowOperand, kLayout, Major::mn, RowTiles,
                                      PackedIntermediateGradientWeights<Format>>(g, multiprocessors, stream);
}

}  // namespace anabranch::cuda::hopper
