// Launches the gradient of the intermediate rows with packed weights.
#pragma once

#include "experts/portable/intermediate_gradient.cuh"
#include "experts/portable/packed_operand.cuh"

namespace anabranch::cuda::portable {

template <class Format, int32_t kDtype, TileChoice kTile>
ab_status launch_packed_intermediate_gradient(const PackedIntermediateGradient& g, int multiprocessors,
                                              cudaStream_t stream) {
  using Element = ElementOf<kDtype>;
  PackedProductOf<Element, kTile, PackedOperand<Format, Major::mn>, IntermediateGradientEpilogue<Element>> product;
  describe(g.packed, 0, &product.b);
  return launch_intermediate_gradient(product, g, multiprocessors, stream);
}

}  // namespace anabranch::cuda::portable
