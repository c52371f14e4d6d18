// Launches GEMMs over rows with packed weights.
#pragma once

#include "experts/hopper/packed_operand.cuh"
#include "experts/hopper/rows_product.cuh"

namespace anabranch::cuda::hopper {

template <class Shape, class Format, Major kMajor>
ab_status launch_packed_rows_product(const PackedRowsProduct& p, int multiprocessors, cudaStream_t stream) {
  using Element = BFloat16;
  using Epilogue = RowsEpilogue<Element>;
  using Weights = PackedOperand<Shape, Format, GateUpLayout::ungated, kMajor>;
  RowsProductOf<Shape, Element, RowOperand, kMajor, Epilogue, Weights> product;
  AB_RETURN_IF_ERROR(prepare_rows<Shape::kRows>("x", {const_cast<void*>(p.x), p.dtype}, p.map, p.D, &product.a));
  static_cast<PackedSource&>(product.b) =
      packed_source<Format, GateUpLayout::ungated, Shape::kColumns, kMajor, Shape::kProducers>(p.packed, p.first_column,
                                                                                               p.N);
  AB_RETURN_IF_ERROR((prepare_rows_product<Shape, Element, RowOperand, kMajor, Epilogue, Weights>(p, &product)));
  return launch_product("packed grouped GEMM", product, max_tiles(p, product), multiprocessors, stream);
}

template <class Format, Major kMajor>
ab_status launch_packed_rows_product(const PackedRowsProduct& p, int multiprocessors, cudaStream_t stream) {
  if constexpr (kMajor == Major::k) {  // the backward pass has large tiles only
    if (has_few_rows(p.R, p.E)) {
      return launch_packed_rows_product<PackedTile64x128, Format, kMajor>(p, multiprocessors, stream);
    }
  }
  return launch_packed_rows_product<PackedTile256x128, Format, kMajor>(p, multiprocessors, stream);
}

}  // namespace anabranch::cuda::hopper
