// Launches gradients of what experts hide; compiled once for gated experts and once for the others.
#pragma once

#include "experts/hopper/gathered.cuh"
#include "experts/hopper/hidden_gradient.h"
#include "experts/hopper/hidden_gradient_out.cuh"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/row_tiles.cuh"

namespace anabranch::cuda {

template <class Shape, class Element, class OperandA, int kParts>
ab_status launch_hidden(const HiddenGradient& g, int multiprocessors, cudaStream_t stream) {
  Product<Shape, Element, OperandA, ShuffledWeights, RowGroups, RowTiles<Shape::kRows, Shape::kColumns, Shape::kBlocks>,
          HiddenGradientOut<Element, kParts>>
      product;
  AB_RETURN_IF_ERROR(prepare_rows<Shape::kRows>("d_out", g.d_y, g.dtype, g.D, &product.a));
  AB_RETURN_IF_ERROR(make_shuffled_matrices_map("w_out", g.w_out, g.dtype, g.E, g.F, g.D, kPanel, &product.b.map));
  auto& out = product.out;
  out.h = static_cast<const Element*>(g.h);
  out.dh = static_cast<Element*>(g.dh);
  out.weighted_a = static_cast<Element*>(g.weighted_a);
  out.dots = g.dots;
  out.weights = RowWeights(g.weights);
  out.columns = static_cast<int32_t>(g.F);
  out.R = static_cast<int32_t>(g.R);
  out.activation = g.activation;
  product.groups = {g.group_sizes,
                    static_cast<int32_t>(g.E),
                    static_cast<int32_t>(g.R),
                    static_cast<int32_t>(g.D),
                    static_cast<int32_t>(ceil_div(g.F, Shape::kColumns)),
                    g.skips_rest};
  const int64_t tiles = most_row_tiles(g.R, g.E, Shape::kRows) * product.groups.column_tiles;
  return launch_product("hidden gradient", product, tiles, multiprocessors, stream);
}

template <int kParts>
ab_status launch_hidden(const HiddenGradient& g, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  const auto with_operand = [&]<class OperandA, class Element>() {
    return tile == TileChoice::k128x256
               ? launch_hidden<InPairs<Tile128x256>, Element, OperandA, kParts>(g, multiprocessors, stream)
               : launch_hidden<InPairs<Tile128x128>, Element, OperandA, kParts>(g, multiprocessors, stream);
  };
  const auto with_element = [&]<class Element>(Element) {
    return g.d_y.slots == nullptr ? with_operand.template operator()<Rows, Element>()
                                  : with_operand.template operator()<GatheredRows, Element>();
  };
  return g.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

// In hidden_gradient_gated.cu and hidden_gradient_ungated.cu.
ab_status multiply_hidden_gated(const HiddenGradient& gradient, TileChoice tile, int multiprocessors,
                                cudaStream_t stream);
ab_status multiply_hidden_ungated(const HiddenGradient& gradient, TileChoice tile, int multiprocessors,
                                  cudaStream_t stream);

}  // namespace anabranch::cuda
