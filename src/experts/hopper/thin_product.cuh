// Launches GEMMs over rows with few columns: the rows u = factor x A of low-rank adapters.
#pragma once

#include "experts/hopper/low_rank.cuh"
#include "experts/hopper/rows_product.cuh"
#include "experts/hopper/subtile_values.cuh"

namespace anabranch::cuda::hopper {

// Writes y = factor acc, rounded once. Padding rows are zero.
template <class Out_>
struct FactorEpilogue : NoPrefetch {
  static constexpr bool kDefersStores = false;
  template <class Shape>
  static constexpr bool kNeedsRegisters = false;

  RowsEpilogue<Out_> y;
  RowWeights rows;  // without weights
  float factor;

  __device__ void prefetch_maps() const { y.prefetch_maps(); }

  template <class Shape>
  __device__ void write(SubtileWriter& writer, const Tile& tile, int row, int, const float (&acc)[Shape::kColumns / 2],
                        EmptyPrefetch) const {
    if (tile.row + row >= tile.end_row) return;
    RowPair pair(rows, tile, row);
    const bool all_real = pair.all_real();
    pair.weight[0] = pair.weight[1] = factor;
#pragma unroll
    for (int column = 0; column < Shape::kColumns; column += kSubtileColumns<Out_>) {
      if (tile.column + column >= y.columns) return;
      SubtileValues<Out_> result(acc + column / 2);
      result.scale(pair);
      if (!all_real) result.clear_padding(pair);
      writer.write_subtile(y, tile, row, column, result.values);
    }
  }
  template <class Shape>
  __device__ void write_zeros(SubtileWriter& writer, const Tile& tile, int row) const {
    y.template write_zeros<Shape>(writer, tile, row);
  }
};

template <class Shape, class Element, class OperandA, Major kMajorB>
ab_status launch_thin_product(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  Product<Shape, Element, OperandA, FactorOperand<WeightOperand<kMajorB>>, RowTiles,
          RowTileScheduler<Shape::kRows, Shape::kColumns, Shape::kBlocks>, FactorEpilogue<Element>>
      product;
  AB_RETURN_IF_ERROR(prepare_rows<Shape::kRows>("x", {const_cast<void*>(p.x), p.dtype}, p.map, p.D, &product.a));
  product.b.expert_stride = p.shared_w ? 0 : 1;
  AB_RETURN_IF_ERROR((prepare_weights<Shape, kMajorB>(p, p.w, p.shared_w ? 1 : p.E, p.D,
                                                      static_cast<WeightOperand<kMajorB>*>(&product.b))));
  AB_RETURN_IF_ERROR(prepare_epilogue(p, &product.epilogue.y));
  product.epilogue.rows = RowWeights(p.map, Floats{});
  product.epilogue.factor = p.factor;
  product.tiles = {groups_of(p.group_sizes, p.E, p.R), static_cast<int32_t>(p.D),
                   static_cast<int32_t>(ceil_div(p.N, Shape::kColumns)), p.skips_rest};
  return launch_product("thin grouped GEMM", product, max_tiles(p, product), multiprocessors, stream);
}

template <Major kMajorB>
ab_status launch_thin_product(const RowsProduct& p, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  const auto with_operand = [&]<class OperandA, class Element>() {
    return tile == TileChoice::k128x64
               ? launch_thin_product<Tile128x64, Element, OperandA, kMajorB>(p, multiprocessors, stream)
               : launch_thin_product<Tile128x128, Element, OperandA, kMajorB>(p, multiprocessors, stream);
  };
  const auto with_element = [&]<class Element>(Element) {
    return p.gathers_x && p.map.by_slot ? with_operand.template operator()<GatheredRowOperand, Element>()
                                        : with_operand.template operator()<RowOperand, Element>();
  };
  return p.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

}  // namespace anabranch::cuda::hopper
