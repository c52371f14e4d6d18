// FP8 (e4m3) main loop: partial sums over 128 k are multiplied by the scales of both operands.
//
// Tensor maps, gathers, tiles and the ring count pairs of e4m3 elements as one 16-bit element; a k-block is one scale
// block deep. Tensor cores accumulate within a block, with as few as 14 bits of precision. Blocks are accumulated in
// float32 by ordinary additions. One warpgroup adds while the other multiplies.
#pragma once

#include "core/cuda/divisor.h"
#include "experts/block_scale.h"
#include "experts/hopper/mainloop.cuh"

namespace anabranch::cuda::hopper {

static_assert(2 * kBlockK == kScaleBlock, "one k-block of e4m3 pairs has one scale");

// Scales of rows, [rows, blocks]: at least 1, fewer than 2^32.
struct RowScales {
  const float* scales;
  const int32_t* slots;  // row r is row slots[r] / slots_per_row; nullptr: row r itself
  Divisor slots_per_row;
  int32_t rows;    // number of rows in `scales`
  int32_t blocks;  // per row

  // Returns the index of a row's first scale. Padding rows get any valid index, since their results are not used.
  __device__ uint32_t first_index(int32_t row) const {
    int32_t source = row;
    if (slots != nullptr) {
      const int32_t slot = slots[row];
      source = slot < 0 ? rows : slots_per_row.quotient(slot);
    }
    return source < rows ? static_cast<uint32_t>(source) * static_cast<uint32_t>(blocks) : 0u;
  }
};

// Scales of weights, fewer than 2^32. The first and the last 128 columns of a tile have one scale each.
struct WeightScales {
  const float* scales;
  uint32_t expert_stride;  // elements from one expert to the next
  uint32_t k_stride;       // elements from one block to the next along k
  uint32_t column_stride;  // elements from one block of columns to the next, in the scheduler's columns
  uint32_t half_stride;    // elements from the first half of a tile to the last
  uint32_t last;           // last valid index

  __device__ uint32_t first_index(const Tile& tile) const {
    return static_cast<uint32_t>(tile.expert) * expert_stride +
           static_cast<uint32_t>(tile.column / kScaleBlock) * column_stride;
  }
  // Returns the index for the last half of a tile. If it has no columns in bounds, any valid index.
  __device__ uint32_t last_half(uint32_t first) const { return min(first + half_stride, last); }
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

// acc = A B + u B_factor for the warpgroup's 64 rows. u and B_factor have 16-bit elements and no scales. member: which
// 64 rows of the tile.
template <class Element, class OperandA, class OperandB, class Shape>
__device__ __forceinline__ void multiply_scaled_k_blocks(OperandRing<Shape>& ring, const OperandA& operand_a,
                                                         const OperandB& operand_b, const Tile& tile, int member,
                                                         float (&acc)[Shape::kColumns / 2]) {
  static_assert(Shape::kWarpgroupPanels == 1 && Shape::kTilesInFlight == 1 && Shape::kColumns == 2 * kScaleBlock,
                "two halves of 128 columns by 64 rows per warpgroup");
  static_assert(OperandA::kMajor == Major::k && OperandB::kMajor == Major::k, "wgmma takes e4m3 operands K-major only");
  constexpr int kHalf = kScaleBlock / 2;  // accumulators per thread
  const Descriptor first_a = make_descriptor(shared_address(ring.a[0])) + member * kNextPanel;
  const Descriptor first_b = make_descriptor(shared_address(ring.b[0]));
#pragma unroll
  for (float& value : acc) value = 0.0f;
  const RowScales& row_scales = operand_a.scales;
  const WeightScales& weight_scales = operand_b.scales;
  uint32_t row_index[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t row = tile.row + member * kPanel + warp_index() % 4 * (kPanel / 4) + i * 8 + lane_index() / 4;
    row_index[i] = row_scales.first_index(min(row, tile.end_row - 1));
  }
  uint32_t column_index = weight_scales.first_index(tile);
  // `never` is 0, but the compiler does not know this: for it, the first MMA of each block may add to its accumulators.
  // This forces all MMAs into the same registers, so each waits until the previous sums have been read. Otherwise the
  // compiler would start the next MMAs in other registers, and there are too few.
  float sums[kHalf];
#pragma unroll
  for (float& value : sums) value = 0.0f;
  const int never = static_cast<int>(tile.expert < 0);
  float rows[2];
  float columns[2];
  const auto load_scales = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i] = row_scales.scales[row_index[i]++];
    columns[0] = weight_scales.scales[column_index];
    columns[1] = weight_scales.scales[weight_scales.last_half(column_index)];
    column_index += weight_scales.k_stride;
  };
  const auto wait_for = [&](const typename OperandRing<Shape>::Position& at) {
    ring.full[at.stage].wait(at.phase);
    if constexpr (OperandA::kGathered) fence_async_proxy();
  };
  load_scales();
  const int last_k_block = tile.first_k_block + tile.k_blocks;
  auto at = OperandRing<Shape>::Position::nth(tile.first_k_block);
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
      // While the MMAs run, load everything that the next ones need.
      const float scales[2] = {rows[0] * columns[half], rows[1] * columns[half]};
      if (half == 1 && k_block + 1 < last_k_block) {
        load_scales();
        at = OperandRing<Shape>::Position::nth(k_block + 1);
        wait_for(at);
      }
      wait_for_products<0>();
      finish_accumulators(sums);
      if (half == 1) ring.release(now);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) acc[half * kHalf + i] = fmaf(sums[i], scales[i / 2 % 2], acc[half * kHalf + i]);
    }
  }
  if constexpr (OperandB::kMayHaveLowRank) {
    using Multiply = Wgmma<kScaleBlock, Major::k, Major::k, Element>;
    const int last_block = last_k_block + operand_b.low_rank_blocks();
#pragma unroll 1
    for (int block = last_k_block; block < last_block; ++block) {
      at = OperandRing<Shape>::Position::nth(block);
      ring.full[at.stage].wait(at.phase);
      const Descriptor a = first_a + at.stage * (Shape::kBytesA / kPanelBytes) * kNextPanel;
      const Descriptor b = first_b + at.stage * (Shape::kBytesB / kPanelBytes) * kNextPanel;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        fence_accumulators();
#pragma unroll
        for (int k = 0; k < kBlockK / kWgmmaK; ++k) {
          Multiply::begin(sums, a + k * kNextK<Major::k>,
                          b + half * (kScaleBlock / kPanel) * kNextPanel + k * kNextK<Major::k>, k == 0 ? never : 1);
        }
        commit_products();
        wait_for_products<0>();
        finish_accumulators(sums);
        if (half == 1) ring.release(at);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) acc[half * kHalf + i] += sums[i];
      }
    }
  }
}

}  // namespace anabranch::cuda::hopper
