// Launches the up product, x W_in with the activation in its epilogue.
#pragma once

#include <type_traits>

#include "experts/cuda/tiles/row_tile_scheduler.cuh"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/launchers.h"
#include "experts/hopper/row_operand.cuh"
#include "experts/hopper/up_epilogue.cuh"

namespace anabranch::cuda::hopper {

template <int kParts>
using UpWeights = std::conditional_t<kParts == 2, GatedWeightOperand, WeightOperand<Major::mn>>;

inline ab_status prepare_up_weights(const Up& up, GatedWeightOperand* weights) {
  const FfnSizes& s = up.s;
  const auto make_map = [&](int64_t part, CUtensorMap* map) {
    const char* data = static_cast<const char*>(up.w_in.data) + part * s.F * 2;
    return make_matrices_map("w_in", data, up.w_in.dtype, s.E, s.D, s.F, kPanel, kPanel, map, 2 * s.F);
  };
  AB_RETURN_IF_ERROR(make_map(0, &weights->gate));
  return make_map(1, &weights->up);
}
inline ab_status prepare_up_weights(const Up& up, WeightOperand<Major::mn>* weights) {
  const FfnSizes& s = up.s;
  return make_matrices_map("w_in", up.w_in.data, up.w_in.dtype, s.E, s.D, s.F, kPanel, kPanel, &weights->map);
}

template <class Shape, class Element, class OperandA, int kParts>
ab_status launch_up(const Up& up, int multiprocessors, cudaStream_t stream) {
  constexpr int kWidth = Shape::kColumns / kParts;  // columns of `a`
  const FfnSizes& s = up.s;
  Product<Shape, Element, OperandA, UpWeights<kParts>, RowTiles, RowTileScheduler<Shape::kRows, kWidth, Shape::kBlocks>,
          UpEpilogue<Element, kParts>>
      product;
  AB_RETURN_IF_ERROR(prepare_rows<Shape::kRows>("x", up.x, up.map, s.D, &product.a));
  AB_RETURN_IF_ERROR(prepare_up_weights(up, &product.b));
  const auto make_map = [&](const char* name, void* data, int64_t stride, CUtensorMap* map) {
    return make_row_window_map(name, data, up.x.dtype, s.F, kSubtileColumns<Element>, kSubtileRows, map, stride);
  };
  auto& out = product.epilogue;
  AB_RETURN_IF_ERROR(make_map("a", up.a.data, s.F, &out.a));
  for (int part = 0; part < kParts; ++part) {
    // Without h some memory, for the map.
    void* h = up.h.data == nullptr ? up.a.data : static_cast<char*>(up.h.data) + part * s.F * 2;
    AB_RETURN_IF_ERROR(make_map("h", h, kParts * s.F, &out.h[part]));
  }
  out.b_in = static_cast<const Element*>(up.b_in.data);
  out.weights = RowWeights(up.map, up.weights);
  out.columns = static_cast<int32_t>(s.F);
  out.activation = up.activation;
  out.keeps_h = up.h.data != nullptr;
  product.tiles = {groups_of(up.group_sizes, s.E, s.R), static_cast<int32_t>(s.D),
                   static_cast<int32_t>(ceil_div(s.F, kWidth)), up.skips_rest};
  const int64_t tiles = most_row_tiles(s.R, s.E, Shape::kRows) * product.tiles.column_tiles;
  return launch_product("up product", product, tiles, multiprocessors, stream);
}

template <int kParts>
ab_status launch_up(const Up& up, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  const auto with_operand = [&]<class OperandA, class Element>() {
    return tile == TileChoice::k128x256
               ? launch_up<InPairs<Tile128x256>, Element, OperandA, kParts>(up, multiprocessors, stream)
               : launch_up<InPairs<Tile128x128>, Element, OperandA, kParts>(up, multiprocessors, stream);
  };
  const auto with_element = [&]<class Element>(Element) {
    return up.map.slots == nullptr ? with_operand.template operator()<RowOperand, Element>()
                                   : with_operand.template operator()<GatheredRowOperand, Element>();
  };
  return up.x.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

}  // namespace anabranch::cuda::hopper
