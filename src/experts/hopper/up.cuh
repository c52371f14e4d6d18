// Launches the up GEMM x W_in with the activation in its epilogue.
#pragma once

#include <type_traits>

#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/launchers.h"
#include "experts/hopper/low_rank.cuh"
#include "experts/hopper/row_operand.cuh"
#include "experts/hopper/up_epilogue.cuh"

namespace anabranch::cuda::hopper {

template <GateUpLayout kLayout, Major kMajor>
using UpWeights = std::conditional_t<kLayout == GateUpLayout::gated, GatedWeightOperand<kMajor>,
                                     WeightOperand<kMajor, parts_of(kLayout)>>;

// Makes the tensor map of one part of the range's matrices, or of all P F columns, from `column` on. Boxes have 64
// columns for weights as stored, and box_columns rows for transposed weights.
template <Major kMajor, class Shape>
ab_status make_up_map(const Up& up, int64_t column, int64_t columns, int box_columns, CUtensorMap* map) {
  const FfnSizes& s = up.s;
  const int64_t E = up.range.count(s.E);
  const int64_t expert_columns = s.P * s.F;
  const char* data = static_cast<const char*>(up.w_in.data) +
                     (up.range.first * expert_columns * s.D + column * (kMajor == Major::k ? s.D : 1)) * 2;
  return kMajor == Major::k
             ? make_matrices_map("w_in", data, up.w_in.dtype, E, columns, s.D, kPanel, box_columns, map, s.D,
                                 expert_columns)
             : make_matrices_map("w_in", data, up.w_in.dtype, E, s.D, columns, kPanel, kPanel, map, expert_columns);
}

template <class Shape, Major kMajor>
ab_status prepare_up_weights(const Up& up, GatedWeightOperand<kMajor>* weights) {
  const int64_t F = up.s.F;
  weights->first_expert = static_cast<int32_t>(up.range.first);
  AB_RETURN_IF_ERROR((make_up_map<kMajor, Shape>(up, 0, F, Shape::kColumns / 2, &weights->gate)));
  return make_up_map<kMajor, Shape>(up, F, F, Shape::kColumns / 2, &weights->up);
}
template <class Shape, Major kMajor, int kScale>
ab_status prepare_up_weights(const Up& up, WeightOperand<kMajor, kScale>* weights) {
  weights->first_expert = static_cast<int32_t>(up.range.first);
  return make_up_map<kMajor, Shape>(up, 0, up.s.P * up.s.F, Shape::kColumns / Shape::kBlocks, &weights->map);
}

// Makes the tensor map of b_in with those columns.
inline ab_status make_bias_map(const Up& up, int64_t column, int64_t columns, CUtensorMap* map) {
  const char* data = static_cast<const char*>(up.b_in.data) + column * 2;
  return make_matrices_map("b_in", data, up.b_in.dtype, up.s.E, 1, columns, kPanel, kWgmmaK, map, up.s.P * up.s.F);
}
inline ab_status prepare_up_bias(const Up& up, GatedWeightOperand<Major::mn>* bias) {
  AB_RETURN_IF_ERROR(make_bias_map(up, 0, up.s.F, &bias->gate));
  return make_bias_map(up, up.s.F, up.s.F, &bias->up);
}
template <int kScale>
ab_status prepare_up_bias(const Up& up, WeightOperand<Major::mn, kScale>* bias) {
  return make_bias_map(up, 0, up.s.P * up.s.F, &bias->map);
}

// MainWeights: the operand of W_in; adapters are never packed.
template <class Shape, class Element, class OperandA, GateUpLayout kLayout, Major kMajor, class Tiles = RowTiles,
          class MainWeights = UpWeights<kLayout, kMajor>, class Operation = Up>
ab_status launch_up(const Operation& up, int multiprocessors, cudaStream_t stream) {
  constexpr int kParts = parts_of(kLayout);
  constexpr int kWidth = Shape::kColumns / kParts;  // columns of `a`
  const FfnSizes& s = up.s;
  using Weights = UpWeights<kLayout, kMajor>;
  Product<Shape, Element, OperandA, OperandOfTiles<Tiles, BiasedOperand<MainWeights>, Weights>, Tiles,
          RowTileScheduler<Shape::kRows, kWidth, Shape::kBlocks, Tiles>, UpEpilogue<Element, kLayout>>
      product;
  AB_RETURN_IF_ERROR(prepare_rows<Shape::kRows>("x", up.x, up.map, s.D, &product.a));
  AB_RETURN_IF_ERROR(prepare_up_weights<Shape>(up, static_cast<MainWeights*>(&product.b)));
  product.b.bias_blocks = up.b_in.data == nullptr ? 0 : 1;
  if (up.b_in.data != nullptr) AB_RETURN_IF_ERROR(prepare_up_bias(up, &product.b.bias));
  if constexpr (std::is_same_v<Tiles, RowTiles>) {
    AB_RETURN_IF_ERROR(
        prepare_low_rank<Shape::kRows>(up.low_rank, up.x.dtype, s.E, &product.b, [&](int64_t E, Weights* factor) {
          Up factors = up;
          factors.range = {};
          factors.w_in = {const_cast<void*>(up.low_rank.b), up.x.dtype};
          factors.s.E = E;
          factors.s.D = up.low_rank.rank;
          return prepare_up_weights<Shape>(factors, factor);
        }));
  }
  const auto make_map = [&](const char* name, void* data, int64_t columns, int64_t stride, CUtensorMap* map) {
    return make_row_window_map(name, data, up.x.dtype, columns, kSubtileColumns<Element>, kSubtileRows, map, stride);
  };
  auto& out = product.epilogue;
  AB_RETURN_IF_ERROR(make_map("a", up.a.data, s.F, s.F, &out.a));
  out.stored_a = {static_cast<char*>(up.a.data), s.F * 2};
  for (int64_t i = 0; i < out.kMapsOfH; ++i) {
    // Without h the map still needs a valid address.
    void* h = up.h.data == nullptr ? up.a.data : static_cast<char*>(up.h.data) + i * s.F * 2;
    AB_RETURN_IF_ERROR(make_map("h", h, kParts * s.F / out.kMapsOfH, kParts * s.F, &out.h[i]));
    out.stored_h[i] = {static_cast<char*>(h), kParts * s.F * 2};
  }
  out.weights = RowWeights(up.map, up.weights);
  out.columns = static_cast<int32_t>(s.F);
  out.activation = up.activation;
  out.writes_h = up.h.data != nullptr;
  product.tiles = {groups_of(up.group_sizes, s.E, s.R, up.range), static_cast<int32_t>(s.D),
                   static_cast<int32_t>(ceil_div(s.F, kWidth)), up.skips_rest};
  if constexpr (std::is_same_v<Tiles, PartOfRowTiles>) product.tiles.part = up.part;
  const int64_t tiles = max_group_row_tiles(s.R, s.E, Shape::kRows) * product.tiles.column_tiles;
  return launch_product("up GEMM", product, tiles, multiprocessors, stream);
}

// Layouts other than the default one have gathering kernels only; these read ungathered rows through the identity map.
template <GateUpLayout kLayout, Major kMajor>
ab_status launch_up(const Up& up, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  constexpr bool kIsDefaultLayout = kLayout != GateUpLayout::interleaved && kMajor == Major::mn;
  const auto with_operand = [&]<class OperandA, class Element>() {
    return tile == TileChoice::k128x256
               ? launch_up<InPairs<Tile128x256>, Element, OperandA, kLayout, kMajor>(up, multiprocessors, stream)
               : launch_up<InPairs<Tile128x128>, Element, OperandA, kLayout, kMajor>(up, multiprocessors, stream);
  };
  const auto with_element = [&]<class Element>(Element) {
    if constexpr (kIsDefaultLayout) {
      if (!up.map.by_slot) return with_operand.template operator()<RowOperand, Element>();
    }
    return with_operand.template operator()<GatheredRowOperand, Element>();
  };
  return up.x.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

template <Major kMajor>
ab_status launch_part_of_up(const Up& up, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  constexpr auto kLayout = GateUpLayout::gated;
  const auto launch = [&]<class Shape>() {
    return launch_up<InPairs<Shape>, BFloat16, GatheredRowOperand, kLayout, kMajor, PartOfRowTiles>(up, multiprocessors,
                                                                                                    stream);
  };
  return tile == TileChoice::k128x256 ? launch.template operator()<Tile128x256>()
                                      : launch.template operator()<Tile128x128>();
}

}  // namespace anabranch::cuda::hopper
