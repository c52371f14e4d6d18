// Launches products over rows; compiled once for each way the weights are stored, and for an epilogue.
#pragma once

#include <type_traits>

#include "core/cuda/tensor_map.h"
#include "experts/hopper/finished_rows.cuh"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/row_tiles.cuh"
#include "experts/hopper/rows_product.h"

namespace anabranch::cuda {

// Whether more than the product itself is asked for.
inline bool needs_finish(const RowsProduct& p) {
  return p.bias != nullptr || p.weights.slots != nullptr || p.weights.weights != nullptr;
}

template <class Shape, class Element, class OperandA, Major kMajorB, class Target>
using RowsProductOf = Product<Shape, Element, OperandA, Weights<kMajorB>, RowGroups,
                              RowTiles<Shape::kRows, Shape::kColumns, Shape::kBlocks>, Target>;

template <class Element>
ab_status prepare_target(const RowsProduct& p, RowsOut<Element>* target) {
  target->columns = static_cast<int32_t>(p.N);
  return make_row_window_map("y", p.y, p.dtype, p.N, kStripColumns<Element>, kStripRows, &target->map);
}
template <class Element>
ab_status prepare_target(const RowsProduct& p, FinishedRowsOut<Element>* target) {
  target->bias = static_cast<const Element*>(p.bias);
  target->bias_columns = p.stored_columns();
  target->weights = RowWeights(p.weights);
  target->scales_products = p.scales;
  return prepare_target(p, &target->y);
}

// `product` has its factor A already.
template <class Shape, class Element, class OperandA, Major kMajorB, class Target>
ab_status launch_rows(const RowsProduct& p, RowsProductOf<Shape, Element, OperandA, kMajorB, Target>& product,
                      int multiprocessors, cudaStream_t stream, bool overlaps_previous = true) {
  if constexpr (kMajorB == Major::mn) {
    AB_RETURN_IF_ERROR(
        make_matrices_map("w", p.w, p.dtype, p.E, p.K, p.N, kPanel, kPanel, &product.b.map, p.stored_columns()));
  } else {
    AB_RETURN_IF_ERROR(make_matrices_map("w", p.w, p.dtype, p.E, p.N, p.K, kPanel, Shape::kColumns / Shape::kBlocks,
                                         &product.b.map, p.K, p.stored_columns()));
  }
  AB_RETURN_IF_ERROR(prepare_target(p, &product.out));
  product.groups = {p.group_sizes,
                    static_cast<int32_t>(p.E),
                    static_cast<int32_t>(p.R),
                    static_cast<int32_t>(p.K),
                    static_cast<int32_t>(ceil_div(p.N, Shape::kColumns)),
                    p.skips_rest};
  const int64_t tiles = most_row_tiles(p.R, p.E, Shape::kRows) * product.groups.column_tiles;
  return launch_product("grouped product", product, tiles, multiprocessors, stream, overlaps_previous);
}

template <class Shape, class Element, Major kMajorB, class Target>
ab_status launch_rows(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  RowsProductOf<Shape, Element, Rows, kMajorB, Target> product;
  AB_RETURN_IF_ERROR(make_row_window_map("x", p.x, p.dtype, p.K, kPanel, Shape::kRows, &product.a.map));
  return launch_rows<Shape, Element, Rows, kMajorB, Target>(p, product, multiprocessors, stream);
}

template <Major kMajorB, template <class> class Target>
ab_status launch_rows(const RowsProduct& p, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  const auto with_element = [&]<class Element>(Element) {
    using To = Target<Element>;
    if constexpr (std::is_same_v<To, RowsOut<Element>>) {
      if (tile == TileChoice::k128x192) {
        return launch_rows<InPairs<Tile128x192>, Element, kMajorB, To>(p, multiprocessors, stream);
      }
    }
    return tile == TileChoice::k128x128
               ? launch_rows<InPairs<Tile128x128>, Element, kMajorB, To>(p, multiprocessors, stream)
               : launch_rows<InPairs<Tile128x256>, Element, kMajorB, To>(p, multiprocessors, stream);
  };
  return p.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

// In rows_product_nn.cu, rows_product_nt.cu and rows_product_finished.cu.
ab_status multiply_rows_nn(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);
ab_status multiply_rows_nt(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);
ab_status multiply_rows_finished(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
