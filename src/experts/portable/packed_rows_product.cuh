// Launches GEMMs over rows with packed weights.
#pragma once

#include "experts/portable/packed_operand.cuh"
#include "experts/portable/rows_product.cuh"

namespace anabranch::cuda::portable {

template <class Format, Major kMajor, int32_t kDtype, TileChoice kTile>
ab_status launch_packed_rows_product(const PackedRowsProduct& p, int multiprocessors, cudaStream_t stream) {
  using Element = ElementOf<kDtype>;
  PackedProductOf<Element, kTile, PackedOperand<Format, kMajor>, RowsEpilogue<Element>> product;
  describe(p.packed, p.first_column, &product.b);
  return launch_rows_product(product, p, multiprocessors, stream);
}

}  // namespace anabranch::cuda::portable
