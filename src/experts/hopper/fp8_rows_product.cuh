// Launches FP8 (e4m3) GEMMs over rows.
#pragma once

#include "experts/hopper/fp8_launch.cuh"
#include "experts/hopper/rows_product.cuh"

namespace anabranch::cuda::hopper {

template <class Element, class Epilogue, bool kHasAdapter>
ab_status launch_fp8_rows_product(const Fp8RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  using Weights = WeightOperand<Major::k>;
  Product<Fp8Shape, Element, ScaledRows<RowOperand>, Fp8OperandB<Weights, kHasAdapter>, RowTiles,
          RowTileScheduler<Fp8Shape::kRows, Fp8Shape::kColumns, Fp8Shape::kBlocks>, Epilogue>
      product;
  AB_RETURN_IF_ERROR(prepare_fp8_rows("x", p.x8, p.R, p.D, &product.a));
  AB_RETURN_IF_ERROR(make_fp8_weights_map("w", p.w8, p.E, 0, p.N, p.stored_columns(), p.D,
                                          Fp8Shape::kColumns / Fp8Shape::kBlocks, &product.b.map));
  product.b.scales = scales_of(p.w8, false);
  if constexpr (kHasAdapter) {
    AB_RETURN_IF_ERROR(
        prepare_low_rank<Fp8Shape::kRows>(p.low_rank, p.dtype, p.E, &product.b, [&](int64_t E, Weights* factor) {
          return prepare_weights<Fp8Shape, Major::k>(p, p.low_rank.b, E, p.low_rank.rank, factor);
        }));
  }
  AB_RETURN_IF_ERROR(prepare_epilogue(p, &product.epilogue));
  // The FP8 main loop adds no bias, so the epilogue always does.
  if constexpr (std::is_same_v<Epilogue, ScaleBiasEpilogue<Element>>) {
    product.epilogue.bias = static_cast<const Element*>(p.bias);
  }
  return launch_fp8_product("grouped GEMM", &product, p.group_sizes, p.R, p.E, p.D, ceil_div(p.N, Fp8Shape::kColumns),
                            p.skips_rest, multiprocessors, stream);
}

template <template <class> class Epilogue>
ab_status launch_fp8_rows_product(const Fp8RowsProduct& p, int multiprocessors, cudaStream_t stream) {
  const auto with_element = [&]<class Element>(Element) {
    return p.low_rank.rank > 0 ? launch_fp8_rows_product<Element, Epilogue<Element>, true>(p, multiprocessors, stream)
                               : launch_fp8_rows_product<Element, Epilogue<Element>, false>(p, multiprocessors, stream);
  };
  return p.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

}  // namespace anabranch::cuda::hopper
