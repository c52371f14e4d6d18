// Packed weights (MXFP4, FP8 blocks) as operand B of a GEMM over rows. The producer warpgroup copies their bytes to
// shared memory several k-blocks ahead, and decodes one k-block at a time into a stage of the ring, as bfloat16.
//
//   piece   16 bytes of a row in memory, which share a scale: 32 elements of MXFP4 or 16 of e4m3
//   step    one piece per decoding thread: with 128 threads 64 (MXFP4) or 32 (e4m3) rows of 64 elements
//
// A thread decodes the pieces that it has copied itself, so copies need no barrier. Scales come through registers, one
// k-block ahead. Eight adjacent lanes write all eight chunks of the swizzle, so there are no bank conflicts.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/shared.cuh"
#include "core/cuda/tile_memory.cuh"
#include "core/cuda/warp.cuh"
#include "core/major.h"
#include "experts/cuda/ops/packed.h"
#include "experts/cuda/ops/packed_pieces.cuh"
#include "experts/cuda/ops/packed_words.cuh"
#include "experts/cuda/ops/tiles/tile.cuh"
#include "experts/hopper/gate_up_layout.h"

namespace anabranch::cuda::hopper {

struct Mxfp4 : Mxfp4Pieces {
  static constexpr bool kAlwaysFast = false;

  static __device__ __forceinline__ uint32_t scale_of(uint32_t bits, int32_t) { return bits; }

  // decode_codes() yields 2^-126 times the values of codes. If no scale of the warp is 128 or more, one factor restores
  // both powers of 2.
  template <int kScales>
  static __device__ __forceinline__ bool is_fast(const uint32_t (&scales)[kScales]) {
    uint32_t bits = 0;
#pragma unroll
    for (const uint32_t scale : scales) bits |= scale;
    return __any_sync(kAllLanes, bits >= 128u) == 0;
  }

  // store(i, elements): the i-th eight elements of the piece.
  template <bool kFast, class Store>
  static __device__ __forceinline__ void decode(const uint4& piece, uint32_t scale, const Store& store) {
    const uint32_t factors = kFast ? scale * 0x800080u + 0x3f003f00u : mx_factor(scale) * 0x10001u;
    const uint32_t codes[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      EightElements eight = decode_codes(codes[i]);
      if constexpr (!kFast) {
#pragma unroll
        for (uint32_t& word : eight.words) word = multiply_bfloat16(word, kTwoTo126);
      }
#pragma unroll
      for (uint32_t& word : eight.words) word = multiply_bfloat16(word, factors);
      store(i, eight);
    }
  }
};

struct Fp8Blocks : Fp8Pieces {
  static constexpr bool kAlwaysFast = true;

  template <bool kFast, class Store>
  static __device__ __forceinline__ void decode(const uint4& piece, uint32_t scale, const Store& store) {
    store(0, decode_e4m3<BFloat16>(piece.x, piece.y, float_from_bits(scale)));
    store(1, decode_e4m3<BFloat16>(piece.z, piece.w, float_from_bits(scale)));
  }
};

// Matrices [E, N, C] in memory. k-major operands sum over C; their columns are the rows of N, adjacent ones, or half of
// them rows of the gate and the others the same rows of up. mn-major operands sum over N; their columns are those of C.
// Pieces and scales are counted in 32 bits.
struct PackedSource {
  const uint8_t* values;
  const void* scales;
  int32_t scales_dtype;
  int32_t first_column;  // of a window of columns
  int32_t columns;       // of the window, or of the gate; tiles may end beyond it
  int32_t N;
  uint32_t row_pieces;
  uint32_t block_step;  // from a piece to that of the next k-block
  uint32_t step;        // to that of the next step within a part
  uint32_t part_step;   // from a part's last step to the first of the next part
  uint32_t row_scales;  // likewise for scales
  uint32_t block_scale_step;
  uint32_t scale_step;
  uint32_t part_scale_step;
};

// How the pieces of a k-block are divided among steps, steps among parts, and steps among scales. A row is 128 bytes of
// a stage: a column of a k-major operand; 64 columns with one k of an mn-major one. Parts are gate and up, or the
// panels of an mn-major operand, two at a time if a step has the rows of two.
template <class Format, GateUpLayout kLayout, int kColumns, Major kMajor, int kDecoders>
struct PackedSteps {
  static constexpr bool kIsK = kMajor == Major::k;
  static constexpr int kPieces = kBlockK / Format::kElements;  // per row
  static constexpr int kStepRows = kDecoders / kPieces;
  static constexpr int kSteps = kColumns / kStepRows;
  static constexpr int kPartColumns = std::max(kStepRows, kBlockK);  // of an mn-major operand
  static constexpr int kParts = kIsK ? (kLayout == GateUpLayout::gated ? 2 : 1) : kColumns / kPartColumns;
  static constexpr int kPartSteps = kSteps / kParts;
  // Along a column of the operand, and along k:
  static constexpr int kScaleColumns = kIsK ? Format::kScaleRows : Format::kScaleElements;
  static constexpr int kScaleK = kIsK ? Format::kScaleElements : Format::kScaleRows;
  static constexpr int kScales =  // of a thread
      kColumns /
      std::min(std::max(kScaleColumns, kIsK ? kStepRows : kPartColumns), kIsK ? kColumns / kParts : kColumns);
  static constexpr int kScaleSteps = kSteps / kScales;  // per scale
  static_assert(kIsK ? kPartSteps % kScaleSteps == 0 : kScaleSteps % kPartSteps == 0,
                "a scale belongs to one part, or to whole panels");
};

// A thread's share of decoding the panels of a tile's k-blocks, see Gather.
template <class Format, GateUpLayout kLayout, int kColumns, int kMemoryBytes, Major kMajor, int kDecoders>
class PackedGather : PackedSteps<Format, kLayout, kColumns, kMajor, kDecoders> {
  using Steps = PackedSteps<Format, kLayout, kColumns, kMajor, kDecoders>;
  using Steps::kIsK, Steps::kPartColumns, Steps::kPartSteps, Steps::kPieces, Steps::kScaleK, Steps::kScales,
      Steps::kScaleSteps, Steps::kStepRows, Steps::kSteps;
  static constexpr int kStepBytes = kDecoders * 16;  // in shared memory
  static constexpr int kStages = kMemoryBytes / (kSteps * kStepBytes);
  // Pieces that are loaded to registers before the first is decoded. With 256 columns there are no registers for more.
  static constexpr int kEarly = kColumns <= 128 ? kSteps : 1;

 public:
  // memory: kMemoryBytes of shared memory. Starts to copy the first k-blocks.
  __device__ __forceinline__ PackedGather(const PackedSource& from, const Tile& tile, uint32_t memory) : from_(from) {
    constexpr int kColumnScale = kLayout == GateUpLayout::interleaved ? 2 : 1;
    const int thread = warp_index() % (kDecoders / kWarp) * kWarp + lane_index();
    const int stage_row = thread / kPieces;  // of step 0
    const int row = kIsK ? stage_row : stage_row % kBlockK;
    const int element = (stage_row - row) + thread % kPieces * Format::kElements;
    const int32_t tile_column = kColumnScale * tile.column;
    columns_left_ = from.columns - tile_column - (kIsK ? row : element);
    k_left_ = tile.end_k - (kIsK ? element : row);
    const int32_t column = from.first_column + tile_column;
    const auto stored_row = static_cast<uint32_t>(tile.expert * from.N + (kIsK ? column : 0) + row);
    const auto stored_element = static_cast<uint32_t>((kIsK ? 0 : column) + element);
    pieces_ = stored_row * from.row_pieces + stored_element / Format::kElements;
    first_scale_ = stored_row / Format::kScaleRows * from.row_scales + stored_element / Format::kScaleElements;
    slot_ = memory + thread * 16;
    place_ = swizzled(stage_row, element % kBlockK / 8);
#pragma unroll 1  // the producer has few registers
    for (int k_block = 0; k_block + 1 < kStages; ++k_block) prefetch(tile, k_block, k_block);
    load_scales(0);
    take_scales(0);
  }

  // Must be called for consecutive k-blocks, from 0 on, each time with end_copy() after the caller's arrival.
  __device__ __forceinline__ void copy(uint32_t to, const Tile& tile, int k_block) {
    prefetch(tile, k_block + kStages - 1, stage_ == 0 ? kStages - 1 : stage_ - 1);
    wait_for_copies<kStages - 1>();
    const uint32_t slot = slot_ + stage_ * (kSteps * kStepBytes);
    uint4 pieces[kEarly];
#pragma unroll
    for (int i = 0; i < kEarly; ++i) pieces[i] = load_shared<uint4>(slot + i * kStepBytes);
    load_scales(k_block + 1);
    if (Format::kAlwaysFast || is_fast_) {
      decode<true>(to, slot, pieces);
    } else {
      decode<false>(to, slot, pieces);
    }
    fence_async_proxy();
    if (++stage_ == kStages) stage_ = 0;
  }

  // Waits for what load_scales() has loaded. In copy() the wait would include the loads for the next k-block.
  __device__ __forceinline__ void end_copy(int k_block) { take_scales(k_block + 1); }

 private:
  // Decodes the thread's pieces of a k-block, which begin at `slot`; the first ones are loaded.
  template <bool kFast>
  __device__ __forceinline__ void decode(uint32_t to, uint32_t slot, uint4 (&pieces)[kEarly]) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint4 piece = pieces[i % kEarly];
      if (i + kEarly < kSteps) pieces[i % kEarly] = load_shared<uint4>(slot + (i + kEarly) * kStepBytes);
      Format::template decode<kFast>(piece, scales_[i / kScaleSteps], [&](int j, const EightElements& eight) {
        store_shared(advance_chunks(to + place_, j) + i * (kStepRows * kSwizzleBytes), eight);
      });
    }
  }

  // Copies the thread's pieces of a k-block, as one group; pieces out of bounds are zeros.
  __device__ __forceinline__ void prefetch(const Tile& tile, int k_block, int stage) {
    if (k_block * kBlockK < tile.end_k) {
      uint32_t piece = pieces_ + k_block * from_.block_step;
      const uint32_t to = slot_ + stage * (kSteps * kStepBytes);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        copy_async_16(to + i * kStepBytes, from_.values + uint64_t{piece} * 16, is_valid(i, k_block));
        piece += (i + 1) % kPartSteps == 0 ? from_.part_step : from_.step;
      }
    }
    end_copy_group();
  }

  // Scales out of bounds are zero, so that such elements are zero, too.
  __device__ __forceinline__ void load_scales(int k_block) {
    if (!has_scales(k_block)) return;
    uint32_t at = first_scale_ + k_block * kBlockK / kScaleK * from_.block_scale_step;
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      loaded_scales_[i] =
          is_valid(i * kScaleSteps, k_block) ? Format::load_scale(from_.scales, from_.scales_dtype, at) : 0u;
      at += (i + 1) * kScaleSteps % kPartSteps == 0 ? from_.part_scale_step : from_.scale_step;
    }
  }

  __device__ __forceinline__ void take_scales(int k_block) {
    if (!has_scales(k_block)) return;
#pragma unroll
    for (int i = 0; i < kScales; ++i) scales_[i] = Format::scale_of(loaded_scales_[i], from_.scales_dtype);
    if constexpr (!Format::kAlwaysFast) is_fast_ = Format::is_fast(scales_);
  }

  // Whether the scales differ from those of the k-block before.
  static __device__ __forceinline__ bool has_scales(int k_block) { return k_block * kBlockK % kScaleK == 0; }

  __device__ __forceinline__ bool is_valid(int step, int k_block) const {
    const int row = step % kPartSteps * kStepRows;
    const int column = kIsK ? row : step / kPartSteps * kPartColumns;
    return column < columns_left_ && k_block * kBlockK + (kIsK ? 0 : row) < k_left_;
  }

  const PackedSource& from_;
  uint32_t pieces_;       // index of the piece of step 0 and k-block 0
  uint32_t first_scale_;  // of its scale
  int32_t columns_left_;  // from its column on
  int32_t k_left_;        // from its first element on
  uint32_t slot_;         // its address in stage 0
  uint32_t place_;        // offset of its first element in a stage of the ring
  int stage_ = 0;
  uint32_t loaded_scales_[kScales];  // may not have arrived
  uint32_t scales_[kScales];         // of the k-block to decode
  bool is_fast_;
};

// Describes columns first_column ... first_column + columns - 1 of the operand; with gate and up, columns of the gate
// and the same of up.
template <class Format, GateUpLayout kLayout, int kColumns, Major kMajor, int kDecoders>
PackedSource packed_source(const PackedMatrices& w, int64_t first_column, int64_t columns) {
  using Steps = PackedSteps<Format, kLayout, kColumns, kMajor, kDecoders>;
  constexpr bool kIsK = kMajor == Major::k;
  const int64_t row_pieces = w.C / Format::kElements;
  const int64_t row_scales = w.C / Format::kScaleElements;
  const auto in_32_bits = [](int64_t n) { return static_cast<uint32_t>(n); };
  PackedSource to;
  to.values = w.values;
  to.scales = w.scales;
  to.scales_dtype = w.scales_dtype;
  to.first_column = static_cast<int32_t>(first_column);
  to.columns = static_cast<int32_t>(columns);
  to.N = static_cast<int32_t>(w.N);
  to.row_pieces = in_32_bits(row_pieces);
  to.row_scales = in_32_bits(row_scales);
  to.step = in_32_bits(Steps::kStepRows * row_pieces);
  if (kIsK) {
    constexpr int kScaleStep = Steps::kScaleSteps * Steps::kStepRows / Format::kScaleRows;
    to.block_step = Steps::kPieces;
    to.part_step = in_32_bits((columns - (Steps::kPartSteps - 1) * Steps::kStepRows) * row_pieces);
    to.block_scale_step = 1;
    to.scale_step = in_32_bits(kScaleStep * row_scales);
    to.part_scale_step =
        in_32_bits((columns / Format::kScaleRows - (Steps::kScales / Steps::kParts - 1) * kScaleStep) * row_scales);
  } else {
    to.block_step = in_32_bits(kBlockK * row_pieces);
    to.part_step =
        in_32_bits(Steps::kPartColumns / Format::kElements - (Steps::kPartSteps - 1) * Steps::kStepRows * row_pieces);
    to.block_scale_step = in_32_bits(row_scales);
    to.scale_step = to.part_scale_step = std::max(Steps::kPartColumns / Format::kScaleElements, 1);
  }
  return to;
}

}  // namespace anabranch::cuda::hopper
