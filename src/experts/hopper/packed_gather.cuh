// Packed weights (MXFP4, FP8 blocks) as operand B of a GEMM over rows. A producer warpgroup copies their bytes to
// shared memory several k-blocks ahead, and decodes one k-block at a time into a stage of the ring, as bfloat16.
//
//   piece   16 bytes of a row in memory, which share a scale: 32 elements of MXFP4 or 16 of e4m3
//
// A thread decodes the pieces that it has copied itself, so copies need no barrier. Scales come through registers, one
// k-block ahead. Eight adjacent lanes write all eight chunks of the swizzle, so there are no bank conflicts.
#pragma once

#include <algorithm>
#include <cstdint>

#include "anabranch/types.h"
#include "core/cuda/cluster.cuh"
#include "core/cuda/copy_groups.cuh"
#include "core/cuda/keep.cuh"
#include "core/cuda/panel.cuh"
#include "core/cuda/shared.cuh"
#include "core/cuda/tile_memory.cuh"
#include "core/cuda/warp.cuh"
#include "core/major.h"
#include "experts/cuda/ops/packed.h"
#include "experts/cuda/ops/tiles/tile.cuh"
#include "experts/hopper/gate_up_layout.h"
#include "experts/hopper/packed_formats.cuh"

namespace anabranch::cuda::hopper {

// The distances in bytes between the pieces, or the scales, that a thread reads for a k-block. For scales, the next
// k-block is the next one with new scales.
struct PackedDistances {
  int64_t step;   // to the next one of a part
  int64_t part;   // from the last one of a part to the first one of the next part
  int64_t block;  // from the last one of a k-block to the first one of the next k-block
};

// Matrices [E, N, C] in memory. k-major operands sum over C; their columns are the rows of N, adjacent ones, or half of
// them rows of the gate and the others the same rows of up. mn-major operands sum over N; their columns are those of C.
struct PackedSource {
  const char* values;
  const char* scales;
  int32_t scale_bytes;
  int32_t first_column;  // of a window of columns
  int32_t columns;       // of the window, or of the gate; tiles may end beyond it
  int32_t N;
  uint32_t row_pieces;  // all rows together have fewer than 2^32
  uint32_t row_scales;
  PackedDistances to_piece;
  PackedDistances to_scale;
};

// How the pieces of a k-block are divided among portions, portions among parts, parts among steps, and steps among
// scales. A row is 128 bytes of a stage: a column of a k-major operand; 64 columns with one k of an mn-major one.
//
//   portion  the rows of the stage that a warpgroup decodes: with two portions 64 rows, and otherwise all of them
//   part     the rows of one panel
//   step     rows of a part, of which each thread decodes a piece; a warp's rows of a part are adjacent
template <class Format, GateUpLayout kLayout, int kColumns, Major kMajor, int kPortions>
struct PackedSteps {
  static constexpr bool kIsK = kMajor == Major::k;
  static constexpr int kPieces = kBlockK / Format::kElements;  // per row
  static constexpr int kWarpRows = kWarp / kPieces;            // per step
  static constexpr int kPortionSteps = kColumns / (4 * kWarpRows) / kPortions;
  static constexpr int kParts = kIsK ? 1 : kColumns / kPanel / kPortions;  // of a portion
  static constexpr int kPartSteps = kPortionSteps / kParts;
  static constexpr int kPartRows = 4 * kWarpRows * kPartSteps;
  // Along a column of the operand, and along k:
  static constexpr int kScaleColumns = kIsK ? Format::kScaleRows : Format::kScaleElements;
  static constexpr int kScaleK = kIsK ? Format::kScaleElements : Format::kScaleRows;
  static constexpr int kScaleParts = std::clamp(kScaleColumns / kPanel, 1, kParts);              // parts per scale
  static constexpr int kScaleSteps = kIsK && kScaleColumns == 1 ? 1 : kScaleParts * kPartSteps;  // steps per scale
  static constexpr int kScales = kPortionSteps / kScaleSteps;  // of a thread and portion
  static_assert(kWarpRows % 8 == 0, "the rows of a thread have the same swizzle");
  static_assert(kPortions == 1 || kColumns == 2 * kPanel, "two portions are the panels of a stage");
  static_assert(kPortions == 2 || !kIsK, "a k-major operand has two portions");
};

// A thread's share of decoding one of kPortions portions of a tile's k-blocks, see Gather.
// kLoadsEarly: loads the pieces of a k-block before its stage is empty; else one before the first is decoded, which
// needs fewer registers.
template <class Format, GateUpLayout kLayout, int kColumns, int kMemoryBytes, Major kMajor, int kPortions,
          bool kLoadsEarly>
class PackedGather : PackedSteps<Format, kLayout, kColumns, kMajor, kPortions> {
  using Steps = PackedSteps<Format, kLayout, kColumns, kMajor, kPortions>;
  using Steps::kIsK, Steps::kPartRows, Steps::kParts, Steps::kPartSteps, Steps::kPieces, Steps::kPortionSteps,
      Steps::kScaleK, Steps::kScales, Steps::kScaleSteps, Steps::kWarpRows;
  static constexpr bool kIsGated = kLayout == GateUpLayout::gated;
  static constexpr int kStepBytes = kWarpgroup * 16;  // in shared memory
  static constexpr int kStages = kMemoryBytes / (kPortionSteps * kStepBytes);
  static constexpr int kAhead = kLoadsEarly ? kPortionSteps : 1;
  // Whether each piece is replaced by a later one as soon as it is decoded; else all after the arrival, which needs
  // fewer registers.
  static constexpr bool kCopiesEarly = kPortions > 1;

 public:
  // memory: kMemoryBytes of shared memory, of this warpgroup alone. Starts to copy the first k-blocks.
  __device__ __forceinline__ PackedGather(const PackedSource& from, const Tile& tile, uint32_t memory, int portion)
      : from_(from) {
    constexpr int kColumnScale = kLayout == GateUpLayout::interleaved ? 2 : 1;
    uint32_t thread = threadIdx.x % kWarpgroup;
    keep(thread);  // else there are not enough registers for what the tiles have in common
    const auto warp = static_cast<int>(thread / kWarp), lane = static_cast<int>(thread % kWarp);
    const int row = warp * (kPartRows / 4) + lane / kPieces;  // of step 0 in its part
    const int element = lane % kPieces * Format::kElements;
    const int32_t tile_column = kColumnScale * tile.column + (kIsGated ? 0 : portion * kPanel);
    columns_left_ = from.columns - tile_column - (kIsK ? row : element);
    k_left_ = tile.end_k - (kIsK ? element : row);
    const int32_t column = from.first_column + tile_column + (kIsGated ? portion * from.columns : 0);
    const uint32_t stored_row = static_cast<uint32_t>(tile.expert) * static_cast<uint32_t>(from.N) +
                                static_cast<uint32_t>((kIsK ? column : 0) + row);
    const auto stored_element = static_cast<uint32_t>((kIsK ? 0 : column) + element);
    const uint32_t piece = stored_row * from.row_pieces + stored_element / Format::kElements;
    const uint32_t scale = stored_row / Format::kScaleRows * from.row_scales + stored_element / Format::kScaleElements;
    next_piece_ = from.values + uint64_t{piece} * 16;
    next_scale_ = from.scales + uint64_t{scale} * static_cast<uint32_t>(from.scale_bytes);
    slot_ = memory + thread * 16;
    place_ = swizzled(portion * kPanel + row, element / 8);
#pragma unroll 1  // the producer has few registers
    for (int k_block = 0; k_block < kStages; ++k_block) copy_pieces(k_block, tile, k_block);
    load_scales(0);
    wait_for_pieces();
    take_scales(0);
    load_scales(1);
  }

  // Must be called for consecutive k-blocks, from 0 on, each time with end_copy() after the caller's arrival.
  __device__ __forceinline__ void copy(uint32_t to, const Tile& tile, int k_block) {
    if (Format::kAlwaysFast || is_fast_) {
      decode<true>(to, tile, k_block);
    } else {
      decode<false>(to, tile, k_block);
    }
    fence_async_proxy();
  }

  // Prepares the next k-block.
  __device__ __forceinline__ void end_copy(const Tile& tile, int k_block) {
    if constexpr (!kCopiesEarly) copy_pieces(stage_, tile, k_block + kStages);
    if (++stage_ == kStages) stage_ = 0;
    wait_for_pieces();
    take_scales(k_block + 1);
    load_scales(k_block + 2);
  }

 private:
  __device__ __forceinline__ uint32_t slot_of(int stage) const { return slot_ + stage * (kPortionSteps * kStepBytes); }

  // Waits for the pieces of the k-block to decode next.
  __device__ __forceinline__ void wait_for_pieces() {
    wait_for_copies<kStages - 1>();
    if constexpr (kLoadsEarly) load_pieces(first_pieces_);
  }

  __device__ __forceinline__ void load_pieces(uint4 (&pieces)[kAhead]) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) pieces[i] = load_shared<uint4>(slot_of(stage_) + i * kStepBytes);
  }

  // Decodes the thread's pieces of a k-block.
  template <bool kFast>
  __device__ __forceinline__ void decode(uint32_t to, const Tile& tile, int k_block) {
    const uint32_t slot = slot_of(stage_);
    const uint32_t place = to + place_;
    uint4 pieces[kAhead];
    if constexpr (kLoadsEarly) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) pieces[i] = first_pieces_[i];
    } else {
      load_pieces(pieces);
    }
#pragma unroll
    for (int i = 0; i < kPortionSteps; ++i) {
      const uint4 piece = pieces[i % kAhead];
      if (i + kAhead < kPortionSteps) pieces[i % kAhead] = load_shared<uint4>(slot + (i + kAhead) * kStepBytes);
      const int row = i / kPartSteps * kPartRows + i % kPartSteps * kWarpRows;
      Format::template decode<kFast>(piece, scales_[i / kScaleSteps], [&](int j, const EightElements& eight) {
        store_shared(advance_chunks(place, j) + row * kSwizzleBytes, eight);
      });
      if (kCopiesEarly) copy_piece(slot, i, tile, k_block + kStages);
    }
    if (kCopiesEarly) end_copy_group();
  }

  // Copies the thread's pieces of a k-block, as one group. The group is empty after the last k-block, so no copy is
  // under way at the end of a tile: two copies to one slot have no order.
  __device__ __forceinline__ void copy_pieces(int stage, const Tile& tile, int k_block) {
#pragma unroll
    for (int i = 0; i < kPortionSteps; ++i) copy_piece(slot_of(stage), i, tile, k_block);
    end_copy_group();
  }

  // Pieces out of bounds are zeros.
  __device__ __forceinline__ void copy_piece(uint32_t slot, int i, const Tile& tile, int k_block) {
    if (k_block >= tile.k_blocks) return;
    copy_async_16(slot + i * kStepBytes, next_piece_, is_valid(i, k_block));
    next_piece_ += distance(from_.to_piece, i + 1);
  }

  // Scales out of bounds are zero, so that such elements are zero, too.
  __device__ __forceinline__ void load_scales(int k_block) {
    if (!has_scales(k_block)) return;
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      loaded_scales_[i] = Format::load_scale(is_valid(i * kScaleSteps, k_block), next_scale_, from_.scale_bytes);
      next_scale_ += distance(from_.to_scale, (i + 1) * kScaleSteps);
    }
  }

  // Waits for what load_scales() has loaded.
  __device__ __forceinline__ void take_scales(int k_block) {
    if (!has_scales(k_block)) return;
#pragma unroll
    for (int i = 0; i < kScales; ++i) scales_[i] = Format::scale_of(loaded_scales_[i], from_.scale_bytes);
    if constexpr (!Format::kAlwaysFast) is_fast_ = Format::is_fast(scales_);
  }

  // Whether the scales differ from those of the k-block before.
  static __device__ __forceinline__ bool has_scales(int k_block) { return k_block * kBlockK % kScaleK == 0; }

  // The distance from the step before `step` to `step`, or to the next k-block.
  static __device__ __forceinline__ int64_t distance(const PackedDistances& to, int step) {
    return step == kPortionSteps ? to.block : step % kPartSteps == 0 ? to.part : to.step;
  }

  __device__ __forceinline__ bool is_valid(int step, int k_block) const {
    const int row = step % kPartSteps * kWarpRows;
    const int column = step / kPartSteps * kPanel + (kIsK ? row : 0);
    return column < columns_left_ && k_block * kBlockK + (kIsK ? 0 : row) < k_left_;
  }

  const PackedSource& from_;
  const char* next_piece_;  // to copy
  const char* next_scale_;  // to load
  int32_t columns_left_;    // from the column of the first piece on
  int32_t k_left_;          // from its first element on
  uint32_t slot_;           // its address in stage 0
  uint32_t place_;          // offset of its first element in a stage of the ring
  int stage_ = 0;
  uint4 first_pieces_[kAhead];                          // to decode next, see kLoadsEarly
  typename Format::Scale loaded_scales_[kScales] = {};  // may not have arrived
  uint32_t scales_[kScales];                            // of the k-block to decode
  bool is_fast_;
};

// Describes columns first_column ... first_column + columns - 1 of the operand; with gate and up, columns of the gate
// and the same of up.
template <class Format, GateUpLayout kLayout, int kColumns, Major kMajor, int kPortions>
PackedSource packed_source(const PackedMatrices& w, int64_t first_column, int64_t columns) {
  using Steps = PackedSteps<Format, kLayout, kColumns, kMajor, kPortions>;
  constexpr bool kIsK = kMajor == Major::k;
  const int64_t row_pieces = w.C / Format::kElements;
  const int64_t row_scales = w.C / Format::kScaleElements;
  PackedSource to;
  to.values = reinterpret_cast<const char*>(w.values);
  to.scales = static_cast<const char*>(w.scales);
  to.scale_bytes = w.scales_dtype == AB_FLOAT32 ? 4 : w.scales_dtype == AB_BFLOAT16 ? 2 : 1;
  to.first_column = static_cast<int32_t>(first_column);
  to.columns = static_cast<int32_t>(columns);
  to.N = static_cast<int32_t>(w.N);
  to.row_pieces = static_cast<uint32_t>(row_pieces);
  to.row_scales = static_cast<uint32_t>(row_scales);
  // steps: of a part. parts: of a portion. to_part, to_block: from the first one of a part or a k-block to the first
  // one of the next part or k-block.
  const auto distances = [](int64_t bytes, int steps, int parts, int64_t step, int64_t to_part, int64_t to_block) {
    const int64_t in_part = (steps - 1) * step;
    return PackedDistances{.step = bytes * step,
                           .part = bytes * (to_part - in_part),
                           .block = bytes * (to_block - (parts - 1) * to_part - in_part)};
  };
  constexpr int kScaleStep = Steps::kScaleSteps * Steps::kWarpRows;    // rows
  constexpr int kBlockScales = std::max(kBlockK / Steps::kScaleK, 1);  // along k
  if (kIsK) {
    to.to_piece = distances(16, Steps::kPartSteps, 1, Steps::kWarpRows * row_pieces, 0, Steps::kPieces);
    to.to_scale =
        distances(to.scale_bytes, Steps::kScales, 1, kScaleStep / Format::kScaleRows * row_scales, 0, kBlockScales);
  } else {
    to.to_piece = distances(16, Steps::kPartSteps, Steps::kParts, Steps::kWarpRows * row_pieces,
                            kPanel / Format::kElements, kBlockK * row_pieces);
    to.to_scale = distances(to.scale_bytes, 1, Steps::kScales, 0, Steps::kScaleParts * kPanel / Format::kScaleElements,
                            kBlockScales * row_scales);
  }
  return to;
}

}  // namespace anabranch::cuda::hopper
