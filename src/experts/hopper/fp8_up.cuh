// Launches the FP8 (e4m3) up GEMM.
#pragma once

#include "experts/hopper/fp8_launch.cuh"
#include "experts/hopper/fp8_up_epilogue.cuh"
#include "experts/hopper/up.cuh"

namespace anabranch::cuda::hopper {

// make_map(column, count, box_columns, map): the map of `count` columns from `column` on.
template <class MakeMap>
ab_status prepare_up_maps(int64_t F, const MakeMap& make_map, GatedWeightOperand<Major::k>* weights) {
  AB_RETURN_IF_ERROR(make_map(0, F, Fp8Shape::kColumns / 2, &weights->gate));
  return make_map(F, F, Fp8Shape::kColumns / 2, &weights->up);
}
template <class MakeMap>
ab_status prepare_up_maps(int64_t F, const MakeMap& make_map, WeightOperand<Major::k>* weights) {
  return make_map(0, F, Fp8Shape::kColumns / Fp8Shape::kBlocks, &weights->map);
}

template <GateUpLayout kLayout, class Element, bool kHasAdapter>
ab_status launch_fp8_up(const Fp8Up& up, int multiprocessors, cudaStream_t stream) {
  constexpr int kParts = parts_of(kLayout);
  constexpr int kWidth = Fp8Shape::kColumns / kParts;  // columns of `a`
  const FfnSizes& s = up.s;
  using Weights = std::conditional_t<kParts == 2, GatedWeightOperand<Major::k>, WeightOperand<Major::k>>;
  Product<Fp8Shape, Element, ScaledRows<GatheredRowOperand>, Fp8OperandB<Weights, kHasAdapter>, RowTiles,
          RowTileScheduler<Fp8Shape::kRows, kWidth, Fp8Shape::kBlocks>, Fp8UpEpilogue<Element, kLayout, kHasAdapter>>
      product;
  AB_RETURN_IF_ERROR(gather_fp8_rows("x", up.x8, up.w8, up.map, s.D, &product.a));
  const auto map_weights = [&](int64_t column, int64_t count, int box_columns, CUtensorMap* map) {
    return make_fp8_weights_map("w_in", up.w8, s.E, column, count, s.P * s.F, s.D, box_columns, map);
  };
  AB_RETURN_IF_ERROR(prepare_up_maps(s.F, map_weights, static_cast<Weights*>(&product.b)));
  product.b.scales = scales_of(up.w8, kParts == 2);
  if constexpr (kHasAdapter) {
    const LowRank& term = up.low_rank;
    AB_RETURN_IF_ERROR(
        prepare_low_rank<Fp8Shape::kRows>(term, up.x.dtype, s.E, &product.b, [&](int64_t E, Weights* factor) {
          const auto map_factor = [&](int64_t column, int64_t count, int box_columns, CUtensorMap* map) {
            return make_matrices_map("lora_b_in", static_cast<const char*>(term.b) + column * term.rank * 2, up.x.dtype,
                                     E, count, term.rank, kPanel, box_columns, map, term.rank, s.P * s.F);
          };
          return prepare_up_maps(s.F, map_factor, factor);
        }));
  }
  auto& out = product.epilogue;
  AB_RETURN_IF_ERROR(
      make_row_window_map("a", up.a8.values, kPairDtype, s.F / 2, kScaleBlock / 2, kSubtileRows, &out.a, s.F / 2));
  for (int64_t i = 0; i < out.kMapsOfH && up.h.data != nullptr; ++i) {
    using ElementOfH = typename Fp8UpEpilogue<Element, kLayout, kHasAdapter>::ElementOfH;
    const int32_t dtype = sizeof(ElementOfH) == 4 ? AB_FLOAT32 : up.x.dtype;
    void* h = static_cast<char*>(up.h.data) + i * s.F * 2;
    const int64_t row_bytes = kParts * s.F * 2;
    AB_RETURN_IF_ERROR(make_row_window_map("h", h, dtype, s.F, kSubtileColumns<ElementOfH>, kSubtileRows, &out.h[i],
                                           row_bytes / static_cast<int64_t>(sizeof(ElementOfH))));
  }
  if constexpr (kHasAdapter) out.writes_a = up.a.data != nullptr;
  if (up.a.data != nullptr) {
    AB_RETURN_IF_ERROR(
        make_row_window_map("a", up.a.data, up.x.dtype, s.F, kSubtileColumns<Element>, kSubtileRows, &out.a_16_bit));
  }
  out.weights = RowWeights(up.map, up.weights);
  out.columns = static_cast<int32_t>(s.F);
  out.activation = up.activation;
  out.writes_h = up.h.data != nullptr;
  out.bias = static_cast<const Element*>(up.b_in.data);
  out.scales = up.a8.scales;
  out.power_of_two = up.a8.power_of_two;
  return launch_fp8_product("up GEMM", &product, up.group_sizes, s.R, s.E, s.D, ceil_div(s.F, kWidth), up.skips_rest,
                            multiprocessors, stream);
}

template <GateUpLayout kLayout>
ab_status launch_fp8_up(const Fp8Up& up, int multiprocessors, cudaStream_t stream) {
  const auto with_element = [&]<class Element>(Element) {
    return up.low_rank.rank > 0 || up.a.data != nullptr
               ? launch_fp8_up<kLayout, Element, true>(up, multiprocessors, stream)
               : launch_fp8_up<kLayout, Element, false>(up, multiprocessors, stream);
  };
  return up.x.dtype == AB_BFLOAT16 ? with_element(BFloat16{}) : with_element(Float16{});
}

}  // namespace anabranch::cuda::hopper
