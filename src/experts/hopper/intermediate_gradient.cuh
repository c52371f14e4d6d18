// Launches the gradient of the intermediate rows: d_y W_out^T, with the activation's derivative in the epilogue.
#pragma once

#include <type_traits>

#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"
#include "experts/hopper/intermediate_gradient_epilogue.cuh"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/launchers.h"
#include "experts/hopper/low_rank.cuh"
#include "experts/hopper/row_operand.cuh"

namespace anabranch::cuda::hopper {

template <Major kMajor>
using IntermediateGradientWeights =
    std::conditional_t<kMajor == Major::k, ShuffledWeightOperand, WeightOperand<Major::mn>>;

template <class Weights>
ab_status prepare_intermediate_gradient_weights(const IntermediateGradient& g, Weights* weights) {
  const FfnSizes& s = g.s;
  const int64_t E = g.range.count(s.E);
  const char* data = static_cast<const char*>(g.w_out.data) + g.range.first * s.D * s.F * 2;
  weights->first_expert = static_cast<int32_t>(g.range.first);
  return std::is_same_v<Weights, ShuffledWeightOperand>
             ? make_shuffled_matrices_map("w_out", data, g.w_out.dtype, E, s.F, s.D, kPanel, &weights->map)
             : make_matrices_map("w_out", data, g.w_out.dtype, E, s.D, s.F, kPanel, kPanel, &weights->map);
}

// Sets all fields but the quantiser.
template <class Element, GateUpLayout kLayout, bool kShuffled, class Quantizer>
void prepare_epilogue(const IntermediateGradient& g,
                      IntermediateGradientEpilogue<Element, kLayout, kShuffled, Quantizer>* out) {
  out->h = static_cast<const Element*>(g.h.data);
  out->dh = static_cast<Element*>(g.dh.data);
  out->weighted_a = static_cast<Element*>(g.weighted_a.data);
  out->dots = g.dots;
  out->weights = RowWeights(g.map, g.weights);
  out->columns = static_cast<int32_t>(g.s.F);
  out->R = static_cast<int32_t>(g.s.R);
  out->activation = g.activation;
}

// MainWeights: the operand of W_out; adapters are never packed.
template <class Shape, class Element, class OperandA, GateUpLayout kLayout, Major kMajor, class Tiles = RowTiles,
          class MainWeights = IntermediateGradientWeights<kMajor>, class Operation = IntermediateGradient>
ab_status launch_intermediate_gradient(const Operation& g, int multiprocessors, cudaStream_t stream) {
  const FfnSizes& s = g.s;
  using Weights = IntermediateGradientWeights<kMajor>;
  Product<Shape, Element, OperandA, OperandOfTiles<Tiles, MainWeights, Weights>, Tiles,
          RowTileScheduler<Shape::kRows, Shape::kColumns, Shape::kBlocks, Tiles>,
          IntermediateGradientEpilogue<Element, kLayout, kMajor == Major::k>>
      product;
  AB_RETURN_IF_ERROR(prepare_rows<Shape::kRows>("d_out", g.d_y, g.map, s.D, &product.a));
  AB_RETURN_IF_ERROR(prepare_intermediate_gradient_weights(g, static_cast<MainWeights*>(&product.b)));
  if constexpr (std::is_same_v<Tiles, RowTiles>) {
    AB_RETURN_IF_ERROR(
        prepare_low_rank<Shape::kRows>(g.low_rank, g.d_y.dtype, s.E, &product.b, [&](int64_t E, Weights* factor) {
          IntermediateGradient factors = g;
          factors.range = {};
          factors.w_out = {const_cast<void*>(g.low_rank.b), g.d_y.dtype};
          factors.s.E = E;
          factors.s.D = g.low_rank.rank;
          return prepare_intermediate_gradient_weights(factors, factor);
        }));
  }
  prepare_epilogue(g, &product.epilogue);
  product.tiles = {groups_of(g.group_sizes, s.E, s.R, g.range), static_cast<int32_t>(s.D),
                   static_cast<int32_t>(ceil_div(s.F, Shape::kColumns)), g.skips_rest};
  if constexpr (std::is_same_v<Tiles, PartOfRowTiles>) product.tiles.part = g.part;
  const int64_t tiles = max_group_row_tiles(s.R, s.E, Shape::kRows) * product.tiles.column_tiles;
  return launch_product("intermediate gradient", product, tiles, multiprocessors, stream);
}

// Layouts other than the default one have gathering kernels only; these read ungathered rows through the identity map.
template <GateUpLayout kLayout, Major kMajor>
ab_status launch_intermediate_gradient(const IntermediateGradient& g, TileChoice tile, int multiprocessors,
                                       cudaStream_t stream) {
  constexpr bool kIsDefaultLayout = kLayout != GateUpLayout::interleaved && kMajor == Major::k;
  const auto with_operand = [&]<class OperandA, class Element>() {
    return tile == TileChoice::k128x256
               ? launch_intermediate_gradient<InPairs<Tile128x256>, Element, OperandA, kLayout, kMajor>(
                     g, multiprocessors, stream)
               : launch_intermediate_gradient<InPairs<Tile128x128>, Element, OperandA, kLayout, kMajor>(
                     g, multiprocessors, stream);
  };
  const auto with_element = [&]<class Element>(Element) {
    if constexpr (kIsDefaultLayout) {
      if (!g.map.by_slot) return with_operand.template operator()<RowOperand, Element>();
    }
    return with_operand.template operator()<GatheredRowOperand, Element>();
  };
  return g.h.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

template <Major kMajor>
ab_status launch_part_of_intermediate_gradient(const IntermediateGradient& g, TileChoice tile, int multiprocessors,
                                               cudaStream_t stream) {
  constexpr auto kLayout = GateUpLayout::gated;
  const auto launch = [&]<class Shape>() {
    return launch_intermediate_gradient<InPairs<Shape>, BFloat16, GatheredRowOperand, kLayout, kMajor, PartOfRowTiles>(
        g, multiprocessors, stream);
  };
  return tile == TileChoice::k128x256 ? launch.template operator()<Tile128x256>()
                                      : launch.template operator()<Tile128x128>();
}

}  // namespace anabranch::cuda::hopper
