// Launches products over rows; compiled once for each way the weights are stored.
#pragma once

#include "core/cuda/tensor_map.h"
#include "experts/hopper/launch_product.cuh"
#include "experts/hopper/row_tiles.cuh"
#include "experts/hopper/rows_product.h"

namespace anabranch::cuda {

template <class Shape, class Element, class OperandA, Major kMajorB>
using RowsProductOf = Product<Shape, Element, OperandA, Weights<kMajorB>, RowGroups,
                              RowTiles<Shape::kRows, Shape::kColumns>, RowsOut<Element>>;

// All of a product but its factor A.
template <class Shape, class Element, class OperandA, Major kMajorB>
ab_status prepare_rows(const RowsProduct& p, RowsProductOf<Shape, Element, OperandA, kMajorB>* product) {
  if constexpr (kMajorB == Major::mn) {
    AB_RETURN_IF_ERROR(make_matrices_map("w", p.w, p.dtype, p.E, p.K, p.N, kPanel, kPanel, &product->b.map));
  } else {
    AB_RETURN_IF_ERROR(make_matrices_map("w", p.w, p.dtype, p.E, p.N, p.K, kPanel, Shape::kColumns, &product->b.map));
  }
  product->out.columns = static_cast<int32_t>(p.N);
  product->groups = {p.group_sizes, static_cast<int32_t>(p.E), static_cast<int32_t>(p.R), static_cast<int32_t>(p.K),
                     static_cast<int32_t>((p.N + Shape::kColumns - 1) / Shape::kColumns)};
  return make_row_window_map("y", p.y, p.dtype, p.N, kStripColumns<Element>, kStripRows, &product->out.map);
}

// At most so many tiles.
template <class P>
int64_t most_tiles(const P& product) {
  return most_row_tiles(product.groups.R, product.groups.E, P::Shape::kRows) * product.groups.column_tiles;
}

template <class Shape, class Element, Major kMajorB>
ab_status launch_rows(const RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  RowsProductOf<Shape, Element, Rows, kMajorB> product;
  AB_RETURN_IF_ERROR((prepare_rows<Shape, Element, Rows, kMajorB>(p, &product)));
  AB_RETURN_IF_ERROR(make_row_window_map("x", p.x, p.dtype, p.K, kPanel, Shape::kRows, &product.a.map));
  return launch_product("grouped product", product, most_tiles(product), multiprocessors, stream);
}

template <Major kMajorB>
ab_status launch_rows(const RowsProduct& p, TileChoice tile, int multiprocessors, cudaStream_t stream) {
  const auto with_element = [&]<class Element>(Element) {
    switch (tile) {
      case TileChoice::k128x192: return launch_rows<Tile128x192, Element, kMajorB>(p, multiprocessors, stream);
      case TileChoice::k128x128: return launch_rows<Tile128x128, Element, kMajorB>(p, multiprocessors, stream);
      default: return launch_rows<Tile128x256, Element, kMajorB>(p, multiprocessors, stream);
    }
  };
  return p.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

// In rows_product_nn.cu and rows_product_nt.cu.
ab_status multiply_rows_nn(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);
ab_status multiply_rows_nt(const RowsProduct& product, TileChoice tile, int multiprocessors, cudaStream_t stream);

}  // namespace anabranch::cuda
