// Launches the up GEMM with packed weights.
#pragma once

#include "experts/portable/packed_operand.cuh"
#include "experts/portable/up.cuh"

namespace anabranch::cuda::portable {

template <class Format, int32_t kDtype, TileChoice kTile>
ab_status launch_packed_up(const PackedUp& up, int multiprocessors, cudaStream_t stream) {
  using Element = ElementOf<kDtype>;
  PackedProductOf<Element, kTile, PackedOperand<Format, Major::k>, UpEpilogue<Element>> product;
  describe(up.packed, 0, &product.b);
  return launch_up(product, up, multiprocessors, stream);
}

}  // namespace anabranch::cuda::portable
