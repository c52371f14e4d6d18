// Launches GEMMs over rows with few columns: the rows u = factor x A of low-rank adapters.
#pragma once

#include "experts/hopper/low_rank.cuh"
#include "experts/hopper/rows_product.cuh"

namespace anabranch::cuda::hopper {

// Writes y = factor acc, rounded once.
template <class Out_>
struct FactorEpilogue : RowsEpilogue<Out_> {
  static constexpr bool kDefersStores = false;
  float factor;

  template <class Shape>
  __device__ void write(SubtileWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        EmptyPrefetch) const {
    float scaled[Shape::kColumns / 2];
    copy_accumulators(scaled, acc);
#pragma unroll
    for (float& value : scaled) value *= factor;
    writer.write<Shape::kColumns>(*this, tile, row, scaled);
  }
};

template <class Shape, class Element, Major kMajorB>
ab_status launch_thin_product(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  Product<Shape, Element, GatheredRowOperand, FactorOperand<WeightOperand<kMajorB>>, RowTiles,
          RowTileScheduler<Shape::kRows, Shape::kColumns, Shape::kBlocks>, FactorEpilogue<Element>>
      product;
  const RowMap map = p.gathers_x ? p.map : RowMap(static_cast<const ab_tensor*>(nullptr), 0, 1, p.R);
  AB_RETURN_IF_ERROR(prepare_rows<Shape::kRows>("x", {const_cast<void*>(p.x), p.dtype}, map, p.D, &product.a));
  product.b.expert_stride = p.shared_w ? 0 : 1;
  AB_RETURN_IF_ERROR((prepare_weights<Shape, kMajorB>(p, p.w, p.shared_w ? 1 : p.E, p.D,
                                                      static_cast<WeightOperand<kMajorB>*>(&product.b))));
  AB_RETURN_IF_ERROR(prepare_epilogue(p, static_cast<RowsEpilogue<Element>*>(&product.epilogue)));
  product.epilogue.factor = p.factor;
  product.tiles = {groups_of(p.group_sizes, p.E, p.R), static_cast<int32_t>(p.D),
                   static_cast<int32_t>(ceil_div(p.N, Shape::kColumns)), p.skips_rest};
  return launch_product("thin grouped GEMM", product, max_tiles(p, product), multiprocessors, stream);
}

template <Major kMajorB>
ab_status launch_thin_product(const RowsProduct& p, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  const auto with_element = [&]<class Element>(Element) {
    return tile == TileChoice::k128x64
               ? launch_thin_product<InPairs<Tile128x64>, Element, kMajorB>(p, multiprocessors, stream)
               : launch_thin_product<InPairs<Tile128x128>, Element, kMajorB>(p, multiprocessors, stream);
  };
  return p.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

}  // namespace anabranch::cuda::hopper
