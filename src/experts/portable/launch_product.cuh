// Launches grouped GEMMs, and describes their operands.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/cuda/device.h"
#include "core/cuda/vector.cuh"
#include "experts/cuda/ops/low_rank.h"
#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"
#include "experts/portable/kernel.cuh"

namespace anabranch::cuda::portable {

template <int32_t kDtype>
using ElementOf =
    std::conditional_t<kDtype == AB_BFLOAT16, BFloat16, std::conditional_t<kDtype == AB_FLOAT16, Float16, float>>;

// Resident CTAs per SM on the current device.
template <class Shape>
int blocks_at_a_time() {
  Device device;
  if (current_device(&device) != cudaSuccess) return 1;
  return std::clamp(device.shared_bytes / kSharedBytes<Shape>, 1, Shape::kBlocks);
}

// tiles: upper bound on the number of tiles.
template <class P>
ab_status launch_product(const char* name, const P& product, int64_t tiles, int multiprocessors, cudaStream_t stream) {
  using Shape = typename P::Shape;
  const int64_t blocks = int64_t{multiprocessors} * blocks_at_a_time<Shape>();
  return launch(name, grouped_gemm_mma<P>,
                {std::min(tiles, blocks), Shape::kThreads, sizeof(SharedMemory<Shape>), stream, true}, product);
}

// Describes rows of `columns` elements, where the matrices of consecutive experts are `matrix` elements apart.
// second_part: the first column of a second part, or 0. Copies are at most as wide as all of these are aligned.
template <class Element>
MatrixRows matrix_rows(const void* data, int64_t columns, int64_t matrix, int64_t second_part = 0) {
  constexpr int64_t kBytes = sizeof(Element);
  MatrixRows rows;
  rows.data = static_cast<const char*>(data);
  rows.row_bytes = columns * kBytes;
  rows.matrix_bytes = matrix * kBytes;
  rows.copy_bytes =
      common_alignment({address(data), static_cast<uintptr_t>(rows.row_bytes),
                        static_cast<uintptr_t>(rows.matrix_bytes), static_cast<uintptr_t>(second_part * kBytes)});
  return rows;
}

constexpr int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

// A GEMM over the rows of groups, with operand B in either orientation.
template <class Element, Precision kPrecision, TileChoice kTile, Major kMajorB, class Epilogue>
using RowsProductOf =
    Product<TileOf<Element, kPrecision, kTile>, Element, kPrecision, RowOperand, WeightOperand<kMajorB>, RowTiles,
            RowTileScheduler<TileOf<Element, kPrecision, kTile>::kRows, 1>, Epilogue>;

// A GEMM over rows with packed weights, with or without an adapter.
template <class Element, TileChoice kTile, class Weights, class Epilogue>
using PackedProductOf =
    AdaptedProduct<Product<TileOf<Element, Precision::highest, kTile>, Element, Precision::highest, RowOperand, Weights,
                           RowTiles, RowTileScheduler<TileOf<Element, Precision::highest, kTile>::kRows, 1>, Epilogue>>;

// The GEMM P, with an adapter if kHasAdapter.
template <bool kHasAdapter, class P>
using MaybeAdapted = std::conditional_t<kHasAdapter, AdaptedProduct<P>, P>;

// Describes the operands of the adapter. b must be described already; columns: of its matrices, as in matrix_rows().
template <class P>
void add_low_rank(P& product, const LowRank& low_rank, int64_t columns, int64_t second_part = 0) {
  if constexpr (kAdapted<P>) {
    using Element = typename P::Element;
    constexpr Major kMajorB = P::OperandB::kMajor;
    const int64_t matrix = low_rank.shared ? 0 : low_rank.rank * columns;
    product.u.rows = matrix_rows<Element>(low_rank.u, low_rank.rank, 0);
    product.factor = product.b;
    product.factor.rows = kMajorB == Major::k ? matrix_rows<Element>(low_rank.b, low_rank.rank, matrix)
                                              : matrix_rows<Element>(low_rank.b, columns, matrix, second_part);
    product.rank = static_cast<int32_t>(low_rank.rank);
  }
}

// columns, tile_columns: of the result and of a tile, in the epilogue's units.
template <class P>
ab_status launch_over_rows(const char* name, P& product, const Groups& groups, const RowMap& map, int64_t k,
                           int64_t columns, int tile_columns, bool skips_rest, int multiprocessors,
                           cudaStream_t stream) {
  const int64_t column_tiles = tiles_of(columns, tile_columns);
  product.a.map = map;
  product.map = map;
  product.tiles = {groups, static_cast<int32_t>(k), static_cast<int32_t>(column_tiles), skips_rest};
  product.tile_columns = tile_columns;
  const int64_t tiles = max_group_row_tiles(groups.R, groups.E, P::Shape::kRows) * column_tiles;
  return launch_product(name, product, tiles, multiprocessors, stream);
}

}  // namespace anabranch::cuda::portable
