// The main loop of products of float8_e4m3fn, whose sums over 128 of k are multiplied by the scales of both operands.
//
// Two elements of 8 bits stand where one of 16 does: tensor maps, gathers, tiles and the ring count pairs, and a
// k-block is one block of scales deep. Tensor cores sum inside a block, whose sum may keep as few as 14 binary digits;
// the sums of blocks are float32, by ordinary additions. While one warpgroup adds, the other one multiplies.
#pragma once

#include "core/cuda/divisor.h"
#include "experts/block_scale.h"
#include "experts/hopper/mainloop.cuh"

namespace anabranch::cuda::hopper {

static_assert(2 * kBlockK == kScaleBlock, "one k-block of e4m3 pairs has one scale");

// Scales of rows, [rows, blocks], fewer than 2^32, and one at least.
struct RowScales {
  const float* scales;
  const int32_t* slots;  // row r is row slots[r] / slots_per_row; nullptr: row r itself
  Divisor slots_per_row;
  int32_t rows;    // there are
  int32_t blocks;  // of a row

  // Where the scales of a row of the product begin; of padding, whose results are not used, any.
  __device__ uint32_t of(int32_t row) const {
    int32_t source = row;
    if (slots != nullptr) {
      const int32_t slot = slots[row];
      source = slot < 0 ? rows : slots_per_row.quotient(slot);
    }
    return source < rows ? static_cast<uint32_t>(source) * static_cast<uint32_t>(blocks) : 0u;
  }
};

// Scales of weights, fewer than 2^32. A tile's first 128 columns have one, and its last.
struct WeightScales {
  const float* scales;
  uint32_t of_expert;   // elements from expert to expert
  uint32_t of_k;        // from block to block along k
  uint32_t of_columns;  // along the columns that tiles count
  uint32_t of_half;     // from the first half of a tile to the last
  uint32_t last;        // there is

  __device__ uint32_t of(const Tile& tile) const {
    return static_cast<uint32_t>(tile.expert) * of_expert +
           static_cast<uint32_t>(tile.column / kScaleBlock) * of_columns;
  }
  // Of the last half, or any scale where there are no such columns.
  __device__ uint32_t half_of(uint32_t first) const { return min(first + of_half, last); }
};

template <class Operand>
struct ScaledRows : Operand {
  static constexpr bool kScaled = true;
  RowScales scales;
};

template <class Operand>
struct ScaledWeights : Operand {
  WeightScales scales;
};

// acc = A B for the warpgroup's 64 rows; `member`: which of the tile's.
template <class OperandA, class OperandB, class Shape>
__device__ __forceinline__ void multiply_scaled_k_blocks(OperandRing<Shape>& ring, const OperandA& operand_a,
                                                         const OperandB& operand_b, const Tile& tile, int member,
                                                         float (&acc)[Shape::kColumns / 2]) {
  static_assert(Shape::kWarpgroupPanels == 1 && Shape::kTilesInFlight == 1 && Shape::kColumns == 2 * kScaleBlock,
                "two halves of 128 columns by 64 rows per warpgroup");
  static_assert(OperandA::kMajor == Major::k && OperandB::kMajor == Major::k, "wgmma takes e4m3 operands K-major only");
  constexpr int kHalf = kScaleBlock / 2;  // accumulators of a thread
  const Descriptor first_a = make_descriptor(shared_address(ring.a[0])) + member * kNextPanel;
  const Descriptor first_b = make_descriptor(shared_address(ring.b[0]));
#pragma unroll
  for (float& value : acc) value = 0.0f;
  const RowScales& row_scales = operand_a.scales;
  const WeightScales& weight_scales = operand_b.scales;
  uint32_t of_rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t row = tile.row + member * kPanel + warp_index() % 4 * (kPanel / 4) + i * 8 + lane_index() / 4;
    of_rows[i] = row_scales.of(min(row, tile.end_row - 1));
  }
  uint32_t of_columns = weight_scales.of(tile);
  // Whether the first product of a block adds to what is there is false, but for all the compiler knows may be true: so
  // all products have the same registers, and wait until those of the ones before have been read. Else it begins the
  // next products in others, which there are too few of.
  float sums[kHalf];
#pragma unroll
  for (float& value : sums) value = 0.0f;
  const int never = static_cast<int>(tile.expert < 0);
  float rows[2];
  float columns[2];
  const auto load_scales = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i] = row_scales.scales[of_rows[i]++];
    columns[0] = weight_scales.scales[of_columns];
    columns[1] = weight_scales.scales[weight_scales.half_of(of_columns)];
    of_columns += weight_scales.of_k;
  };
  const auto wait_for = [&](const typename OperandRing<Shape>::Position& at) {
    ring.full[at.stage].wait(at.phase);
    if constexpr (OperandA::kGathered) fence_async_proxy();
  };
  load_scales();
  const int last_k_block = tile.first_k_block + tile.k_blocks;
  auto at = OperandRing<Shape>::Position::of(tile.first_k_block);
  wait_for(at);
#pragma unroll 1
  for (int k_block = tile.first_k_block; k_block < last_k_block; ++k_block) {
    const Descriptor a = first_a + at.stage * (Shape::kBytesA / kPanelBytes) * kNextPanel;
    const Descriptor b = first_b + at.stage * (Shape::kBytesB / kPanelBytes) * kNextPanel;
    const auto now = at;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      fence_accumulators();
#pragma unroll
      for (int k = 0; k < kBlockK / kWgmmaK; ++k) {
        Wgmma8<kScaleBlock>::begin(sums, a + k * kNextK<Major::k>,
                                   b + half * (kScaleBlock / kPanel) * kNextPanel + k * kNextK<Major::k>,
                                   k == 0 ? never : 1);
      }
      commit_products();
      // While they run, all that the next ones need.
      const float scales[2] = {rows[0] * columns[half], rows[1] * columns[half]};
      if (half == 1 && k_block + 1 < last_k_block) {
        load_scales();
        at = OperandRing<Shape>::Position::of(k_block + 1);
        wait_for(at);
      }
      wait_for_products<0>();
      finish_accumulators(sums);
      if (half == 1) ring.release(now);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) acc[half * kHalf + i] = fmaf(sums[i], scales[i / 2 % 2], acc[half * kHalf + i]);
    }
  }
}

}  // namespace anabranch::cuda::hopper
