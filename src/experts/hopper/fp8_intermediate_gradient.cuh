// Launches the gradient of the intermediate rows as an FP8 (e4m3) GEMM.
#pragma once

#include "experts/hopper/fp8_launch.cuh"
#include "experts/hopper/fp8_row_quantizer.cuh"
#include "experts/hopper/intermediate_gradient.cuh"

namespace anabranch::cuda::hopper {

template <GateUpLayout kLayout, class Element, bool kHasAdapter>
ab_status launch_fp8_intermediate_gradient(const Fp8IntermediateGradient& g, int multiprocessors, cudaStream_t stream) {
  const FfnSizes& s = g.s;
  using Weights = ShuffledWeightOperand;
  Product<Fp8Shape, Element, ScaledRows<GatheredRowOperand>, Fp8OperandB<Weights, kHasAdapter>, RowTiles,
          RowTileScheduler<Fp8Shape::kRows, Fp8Shape::kColumns, Fp8Shape::kBlocks>,
          IntermediateGradientEpilogue<Element, kLayout, true, Fp8RowQuantizer<Element, parts_of(kLayout)>>>
      product;
  AB_RETURN_IF_ERROR(gather_fp8_rows("d_out", g.d_y8, g.w8, g.map, s.D, &product.a));
  AB_RETURN_IF_ERROR(
      make_shuffled_matrices_map("w_out", g.w8.values, kPairDtype, s.E, s.F, s.D / 2, kPanel, &product.b.map));
  product.b.scales = scales_of(g.w8, false);
  if constexpr (kHasAdapter) {
    AB_RETURN_IF_ERROR(
        prepare_low_rank<Fp8Shape::kRows>(g.low_rank, g.d_y.dtype, s.E, &product.b, [&](int64_t E, Weights* factor) {
          return make_shuffled_matrices_map("lora_a_out", g.low_rank.b, g.d_y.dtype, E, s.F, g.low_rank.rank, kPanel,
                                            &factor->map);
        }));
  }
  prepare_epilogue(g, &product.epilogue);
  product.epilogue.quantizer = {static_cast<uint8_t*>(g.dh8.values), g.dh8.scales, static_cast<int32_t>(s.F),
                                g.dh8.power_of_two};
  return launch_fp8_product("intermediate gradient", &product, g.group_sizes, s.R, s.E, s.D,
                            ceil_div(s.F, Fp8Shape::kColumns), g.skips_rest, multiprocessors, stream);
}

template <GateUpLayout kLayout>
ab_status launch_fp8_intermediate_gradient(const Fp8IntermediateGradient& g, int multiprocessors, cudaStream_t stream) {
  const auto with_element = [&]<class Element>(Element) {
    return g.low_rank.rank > 0 ? launch_fp8_intermediate_gradient<kLayout, Element, true>(g, multiprocessors, stream)
                               : launch_fp8_intermediate_gradient<kLayout, Element, false>(g, multiprocessors, stream);
  };
  return g.h.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

}  // namespace anabranch::cuda::hopper
