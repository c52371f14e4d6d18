// Launches the up GEMM with packed weights.
#pragma once

#include "experts/hopper/packed_operand.cuh"
#include "experts/hopper/up.cuh"

namespace anabranch::cuda::hopper {

template <class Shape, class Format, GateUpLayout kLayout>
ab_status prepare_up_weights(const PackedUp& up, PackedOperand<Shape, Format, kLayout, Major::k>* weights) {
  const int64_t columns = kLayout == GateUpLayout::gated ? up.s.F : up.s.P * up.s.F;
  static_cast<PackedSource&>(*weights) =
      packed_source<Format, kLayout, Shape::kColumns, Major::k, Shape::kProducers>(up.packed, 0, columns);
  return ok();
}

template <class Format, GateUpLayout kLayout>
ab_status launch_packed_up(const PackedUp& up, int multiprocessors, cudaStream_t stream) {
  const auto launch = [&]<class Shape>(Shape) {
    return launch_up<Shape, BFloat16, ClampedRowOperand, kLayout, Major::k, RowTiles,
                     PackedOperand<Shape, Format, kLayout, Major::k>>(up, multiprocessors, stream);
  };
  return has_few_rows(up.s.R, up.s.E) ? launch(PackedTile64x128{}) : launch(PackedTile256x128{});
}

}  // namespace anabranch::cuda::hopper
