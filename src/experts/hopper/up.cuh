// Launches up products; compiled once for gated experts and once for the others.
#pragma once

#include <type_traits>

#include "experts/hopper/gathered.cuh"
#include "experts/hopper/hidden_out.cuh"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/row_tiles.cuh"
#include "experts/hopper/up.h"

namespace anabranch::cuda {

template <int kParts>
using UpWeights = std::conditional_t<kParts == 2, GatedWeights, Weights<Major::mn>>;

inline ab_status prepare_up_weights(const UpProduct& p, GatedWeights* weights) {
  const char* up = static_cast<const char*>(p.w_in) + p.F * 2;
  AB_RETURN_IF_ERROR(
      make_matrices_map("w_in", p.w_in, p.dtype, p.E, p.D, p.F, kPanel, kPanel, &weights->gate, 2 * p.F));
  return make_matrices_map("w_in", up, p.dtype, p.E, p.D, p.F, kPanel, kPanel, &weights->up, 2 * p.F);
}
inline ab_status prepare_up_weights(const UpProduct& p, Weights<Major::mn>* weights) {
  return make_matrices_map("w_in", p.w_in, p.dtype, p.E, p.D, p.F, kPanel, kPanel, &weights->map);
}

template <class Shape, class Element, class OperandA, int kParts>
ab_status launch_up(const UpProduct& p, int multiprocessors, cudaStream_t stream) {
  constexpr int kWidth = Shape::kColumns / kParts;  // columns of `a`
  Product<Shape, Element, OperandA, UpWeights<kParts>, RowGroups, RowTiles<Shape::kRows, kWidth, Shape::kBlocks>,
          HiddenOut<Element, kParts>>
      product;
  AB_RETURN_IF_ERROR(prepare_rows<Shape::kRows>("x", p.x, p.dtype, p.D, &product.a));
  AB_RETURN_IF_ERROR(prepare_up_weights(p, &product.b));
  const auto make_map = [&](const char* name, void* data, int64_t stride, CUtensorMap* map) {
    return make_row_window_map(name, data, p.dtype, p.F, kStripColumns<Element>, kStripRows, map, stride);
  };
  auto& out = product.out;
  AB_RETURN_IF_ERROR(make_map("a", p.a, p.F, &out.a));
  for (int part = 0; part < kParts; ++part) {
    void* h = p.h == nullptr ? p.a : static_cast<char*>(p.h) + part * p.F * 2;  // some memory, for the map
    AB_RETURN_IF_ERROR(make_map("h", h, kParts * p.F, &out.h[part]));
  }
  out.b_in = static_cast<const Element*>(p.b_in);
  out.weights = RowWeights(p.weights);
  out.columns = static_cast<int32_t>(p.F);
  out.activation = p.activation;
  out.keeps_h = p.h != nullptr;
  product.groups = {p.group_sizes,
                    static_cast<int32_t>(p.E),
                    static_cast<int32_t>(p.R),
                    static_cast<int32_t>(p.D),
                    static_cast<int32_t>(ceil_div(p.F, kWidth)),
                    p.skips_rest};
  const int64_t tiles = most_row_tiles(p.R, p.E, Shape::kRows) * product.groups.column_tiles;
  return launch_product("up product", product, tiles, multiprocessors, stream);
}

template <int kParts>
ab_status launch_up(const UpProduct& p, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  const auto with_operand = [&]<class OperandA, class Element>() {
    return tile == TileChoice::k128x256
               ? launch_up<InPairs<Tile128x256>, Element, OperandA, kParts>(p, multiprocessors, stream)
               : launch_up<InPairs<Tile128x128>, Element, OperandA, kParts>(p, multiprocessors, stream);
  };
  const auto with_element = [&]<class Element>(Element) {
    return p.x.slots == nullptr ? with_operand.template operator()<Rows, Element>()
                                : with_operand.template operator()<GatheredRows, Element>();
  };
  return p.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

// In up_gated.cu and up_ungated.cu.
ab_status multiply_up_gated(const UpProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);
ab_status multiply_up_ungated(const UpProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
