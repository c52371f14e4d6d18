// Launches GEMMs over rows.
#pragma once

#include <type_traits>

#include "core/cuda/tensor_map.h"
#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/launchers.h"
#include "experts/hopper/low_rank.cuh"
#include "experts/hopper/row_operand.cuh"
#include "experts/hopper/scale_bias_epilogue.cuh"

namespace anabranch::cuda::hopper {

template <class Element>
ab_status prepare_epilogue(const RowsProduct& p, RowsEpilogue<Element>* out) {
  out->columns = static_cast<int32_t>(p.N);
  out->stored = {static_cast<char*>(p.y), p.N * dtype_size(p.dtype)};
  return make_row_window_map("y", p.y, p.dtype, p.N, kSubtileColumns<Element>, kSubtileRows, &out->map);
}
template <class Element>
ab_status prepare_epilogue(const RowsProduct& p, ScaleBiasEpilogue<Element>* out) {
  out->bias = p.weighs_bias() ? static_cast<const Element*>(p.bias) : nullptr;
  out->bias_columns = p.stored_columns();
  out->weights = RowWeights(p.map, p.weights);
  out->scales_accumulators = p.scales();
  return prepare_epilogue(p, &out->y);
}

// Weights: the operand of W; adapters are never packed.
template <class Shape, class Element, class OperandA, Major kMajorB, class Epilogue,
          class Weights = WeightOperand<kMajorB>>
using RowsProductOf = Product<Shape, Element, OperandA, LowRankOperand<BiasedOperand<Weights>, WeightOperand<kMajorB>>,
                              RowTiles, RowTileScheduler<Shape::kRows, Shape::kColumns, Shape::kBlocks>, Epilogue>;

// Makes the map of E matrices `w` for contractions of length D.
template <class Shape, Major kMajorB>
ab_status prepare_weights(const RowsProduct& p, const void* w, int64_t E, int64_t D, WeightOperand<kMajorB>* weights) {
  if constexpr (kMajorB == Major::mn) {
    return make_matrices_map("w", w, p.dtype, E, D, p.N, kPanel, kPanel, &weights->map, p.stored_columns());
  } else {
    return make_matrices_map("w", w, p.dtype, E, p.N, D, kPanel, Shape::kColumns / Shape::kBlocks, &weights->map, D,
                             p.stored_columns());
  }
}

// Prepares all arguments except operand A and the weights.
template <class Shape, class Element, class OperandA, Major kMajorB, class Epilogue, class MainWeights>
ab_status prepare_rows_product(const RowsProduct& p,
                               RowsProductOf<Shape, Element, OperandA, kMajorB, Epilogue, MainWeights>* product) {
  using Weights = WeightOperand<kMajorB>;
  AB_RETURN_IF_ERROR(
      prepare_low_rank<Shape::kRows>(p.low_rank, p.dtype, p.E, &product->b, [&](int64_t E, Weights* factor) {
        return prepare_weights<Shape, kMajorB>(p, p.low_rank.b, E, p.low_rank.rank, factor);
      }));
  product->b.bias_blocks = p.bias == nullptr || p.weighs_bias() ? 0 : 1;
  if (product->b.bias_blocks > 0) {
    AB_RETURN_IF_ERROR(make_matrices_map("bias", p.bias, p.dtype, p.E, 1, p.N, kPanel, kWgmmaK, &product->b.bias.map,
                                         p.stored_columns()));
  }
  AB_RETURN_IF_ERROR(prepare_epilogue(p, &product->epilogue));
  product->tiles = {groups_of(p.group_sizes, p.E, p.R, p.range), static_cast<int32_t>(p.D),
                    static_cast<int32_t>(ceil_div(p.N, Shape::kColumns)), p.skips_rest};
  return ok();
}

// Upper bound on the number of tiles.
template <class P>
int64_t max_tiles(const RowsProduct& p, const P& product) {
  return max_group_row_tiles(p.R, p.E, P::Shape::kRows) * product.tiles.column_tiles;
}

template <class Shape, class Element, Major kMajorB, class Epilogue>
ab_status launch_rows_product(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  RowsProductOf<Shape, Element, RowOperand, kMajorB, Epilogue> product;
  AB_RETURN_IF_ERROR(prepare_rows<Shape::kRows>("x", {const_cast<void*>(p.x), p.dtype}, p.map, p.D, &product.a));
  const char* w = static_cast<const char*>(p.w) + p.range.first * p.D * p.stored_columns() * 2;
  product.b.first_expert = static_cast<int32_t>(p.range.first);
  AB_RETURN_IF_ERROR((prepare_weights<Shape, kMajorB>(p, w, p.range.count(p.E), p.D,
                                                      static_cast<WeightOperand<kMajorB>*>(&product.b))));
  AB_RETURN_IF_ERROR(
      (prepare_rows_product<Shape, Element, RowOperand, kMajorB, Epilogue, WeightOperand<kMajorB>>(p, &product)));
  return launch_product("grouped GEMM", product, max_tiles(p, product), multiprocessors, stream);
}

template <Major kMajorB, template <class> class Epilogue>
ab_status launch_rows_product(const RowsProduct& p, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  const auto with_element = [&]<class Element>(Element) {
    using Out = Epilogue<Element>;
    if constexpr (std::is_same_v<Out, RowsEpilogue<Element>>) {
      if (tile == TileChoice::k128x192) {
        return launch_rows_product<InPairs<Tile128x192>, Element, kMajorB, Out>(p, multiprocessors, stream);
      }
    }
    return tile == TileChoice::k128x128
               ? launch_rows_product<InPairs<Tile128x128>, Element, kMajorB, Out>(p, multiprocessors, stream)
               : launch_rows_product<InPairs<Tile128x256>, Element, kMajorB, Out>(p, multiprocessors, stream);
  };
  return p.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

}  // namespace anabranch::cuda::hopper
