// Operand B of GEMMs whose weights may have a low-rank adapter.
#pragma once

#include <type_traits>

#include "core/cuda/tensor_map.h"
#include "core/floats.h"
#include "core/status.h"
#include "experts/cuda/ops/low_rank.h"
#include "experts/cuda/ops/tiles/row_tile_scheduler.cuh"
#include "experts/hopper/operands.cuh"
#include "experts/hopper/row_operand.cuh"

namespace anabranch::cuda::hopper {

// dtype: of u and B. prepare_factor(E, operand): makes the maps of E matrices B, as of weights with contractions of
// length `rank`.
template <int kRows, class OperandB, class Weights, class PrepareFactor>
ab_status prepare_low_rank(const LowRank& term, int32_t dtype, int64_t E, LowRankOperand<OperandB, Weights>* operand,
                           const PrepareFactor& prepare_factor) {
  operand->low_rank_steps = static_cast<int32_t>(ceil_div(term.rank, kWgmmaK));
  if (term.rank == 0) return ok();
  AB_RETURN_IF_ERROR(prepare_rows<kRows>("u", {const_cast<void*>(term.u), dtype}, RowMap{}, term.rank, &operand->u));
  operand->b.expert_stride = term.shared ? 0 : 1;
  return prepare_factor(term.shared ? 1 : E, static_cast<Weights*>(&operand->b));
}

// Operand B of the GEMM that computes Tiles. Parts of the rows have no adapters.
template <class Tiles, class OperandB, class Factor>
using OperandOfTiles =
    std::conditional_t<std::is_same_v<Tiles, PartOfRowTiles>, OperandB, LowRankOperand<OperandB, Factor>>;

}  // namespace anabranch::cuda::hopper
