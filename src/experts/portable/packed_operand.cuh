// Packed weights (MXFP4, FP8 blocks) as operand B of a GEMM over rows. A thread copies packed pieces to the place of
// the k-block in shared memory, several k-blocks ahead, and decodes the pieces that it has copied itself one k-block
// ahead. So a stage needs no more memory than one of plain weights, and decoding needs no barrier of its own.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda/copy_groups.cuh"
#include "core/cuda/shared.cuh"
#include "experts/cuda/ops/packed.h"
#include "experts/cuda/ops/packed_pieces.cuh"
#include "experts/cuda/ops/packed_words.cuh"
#include "experts/portable/operands.cuh"

namespace anabranch::cuda::portable {

// load_scale() returns the bits of scale i; nothing waits for them before they are used. decode() calls store(i,
// elements) for the i-th eight elements of a piece. scale: its bits in memory.
struct Mxfp4 : Mxfp4Pieces {
  static __device__ __forceinline__ uint32_t load_scale(const void* scales, int32_t /*dtype*/, uint32_t i) {
    return static_cast<const uint8_t*>(scales)[i];
  }

  template <class Element, class Store>
  static __device__ __forceinline__ void decode(const uint4& piece, uint32_t scale, int32_t, const Store& store) {
    const uint32_t factor = mx_factor(scale);
    const float float_factor = low_half<BFloat16>(factor);
    const uint32_t codes[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      EightElements eight = decode_codes(codes[i]);
#pragma unroll
      for (uint32_t& word : eight.words) {
        word = multiply_bfloat16(word, kTwoTo126);
        if constexpr (std::is_same_v<Element, BFloat16>) {
          word = multiply_bfloat16(word, factor * 0x10001u);
        } else {
          word = pack<Element>(low_half<BFloat16>(word) * float_factor, high_half<BFloat16>(word) * float_factor);
        }
      }
      store(i, eight);
    }
  }
};

struct Fp8Blocks : Fp8Pieces {
  static __device__ __forceinline__ uint32_t load_scale(const void* scales, int32_t dtype, uint32_t i) {
    switch (dtype) {
      case AB_FLOAT32: return static_cast<const uint32_t*>(scales)[i];
      case AB_BFLOAT16: return static_cast<const uint16_t*>(scales)[i];
      default: return static_cast<const uint8_t*>(scales)[i];
    }
  }

  template <class Element, class Store>
  static __device__ __forceinline__ void decode(const uint4& piece, uint32_t bits, int32_t dtype, const Store& store) {
    const float scale = float_from_bits(scale_of(bits, dtype));
    store(0, decode_e4m3<Element>(piece.x, piece.y, scale));
    store(1, decode_e4m3<Element>(piece.z, piece.w, scale));
  }
};

// Matrices [E, N, C] in memory. k-major operands sum over C; their columns are rows in memory. mn-major operands sum
// over N; their columns are those in memory. `rows` are rows of packed bytes.
template <class Format_, Major kMajor_>
struct PackedOperand : WeightOperand<kMajor_> {
  using Format = Format_;
  const void* scales;
  int32_t scales_dtype;
  int32_t N;
  int32_t first_column;  // of a window of columns
  uint32_t row_scales;
};

template <class Format, Major kMajor>
void describe(const PackedMatrices& w, int64_t first_column, PackedOperand<Format, kMajor>* to) {
  to->rows.data = reinterpret_cast<const char*>(w.values);
  to->rows.row_bytes = w.C / Format::kElements * kChunkBytes;
  to->rows.matrix_bytes = w.N * to->rows.row_bytes;
  to->rows.copy_bytes = kChunkBytes;
  to->scales = w.scales;
  to->scales_dtype = w.scales_dtype;
  to->N = static_cast<int32_t>(w.N);
  to->first_column = static_cast<int32_t>(first_column);
  to->row_scales = static_cast<uint32_t>(w.C / Format::kScaleElements);
}

// One thread's share of copying and decoding the k-blocks of a tile.
template <class Format, Major kMajor, class Element, int kSides, int kThreads>
class CopyPacked {
  static constexpr bool kIsK = kMajor == Major::k;
  using Operand = PackedOperand<Format, kMajor>;
  using Place = SharedTile<kMajor, sizeof(Element), kSides>;
  using Plan = PackedPlan<Place, Format::kElements, kThreads>;
  static constexpr int kPieces = Plan::kPieces;
  static constexpr int kScaleK = kIsK ? Format::kScaleElements : Format::kScaleRows;  // k per scale
  static_assert(kScaleK == 1 || kScaleK % kDepth<Element> == 0, "a k-block has one scale per column or per element");

 public:
  __device__ CopyPacked(const Operand& from, const Tile& tile, const int32_t*) : operand_(from), decoded_k_(tile.k) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int row = Plan::row(thread, i);
      const int element = Plan::piece(thread, i) * Format::kElements;
      const ColumnPlace place = from.place(tile, kIsK ? row : element);
      const int32_t column = from.first_column + place.column;
      const int32_t stored_row = max(tile.expert, 0) * from.N + (kIsK ? column : tile.k + row);
      const int32_t stored_element = kIsK ? tile.k + element : column;
      from_[i] = from.rows.data + stored_row * from.rows.row_bytes + stored_element / Format::kElements * kChunkBytes;
      // k-major: the scale of k = 0; mn-major: of the thread's row in the k-block at k = 0.
      const int32_t scales_row = kIsK ? stored_row : stored_row - tile.k;
      scale_at_[i] = static_cast<uint32_t>(scales_row) / Format::kScaleRows * from.row_scales +
                     (kIsK ? 0 : static_cast<uint32_t>(column) / Format::kScaleElements);
      end_k_[i] = place.left > 0 ? tile.end_k - (kIsK ? element : row) : 0;
      place_[i] = Place::chunk(row, element / kChunk<Element>);
    }
    load_scales();
  }

  // Must be called for consecutive k-blocks. kBytes: 16.
  template <int kBytes>
  __device__ __forceinline__ void copy(uint32_t to, int32_t k) {
    static_assert(kBytes == kChunkBytes, "pieces are aligned");
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      copy_async_16(to + place_[i], from_[i], k < end_k_[i]);
      from_[i] += kIsK ? Plan::kRowPieces * kChunkBytes : kDepth<Element> * operand_.rows.row_bytes;
    }
  }

  // Decodes the thread's pieces of the k-block in place. Must be called for consecutive k-blocks, whose copies by this
  // thread have arrived. Starts to load the next scales.
  __device__ __forceinline__ void decode(uint32_t block) {
    uint4 pieces[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i] = load_shared<uint4>(block + place_[i]);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t to = block + place_[i];
      Format::template decode<Element>(
          pieces[i], scales_[i], operand_.scales_dtype,
          [&](int j, const EightElements& eight) { store_shared(to ^ static_cast<uint32_t>(j * kChunkBytes), eight); });
    }
    decoded_k_ += kDepth<Element>;
    load_scales();
  }

 private:
  // Elements out of bounds are zeros; their scales are not read.
  __device__ __forceinline__ void load_scales() {
    if (decoded_k_ % kScaleK != 0) return;  // the scales of the previous k-block
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto step = static_cast<uint32_t>(decoded_k_ / kScaleK);
      scales_[i] = 0;
      if (decoded_k_ < end_k_[i]) {
        scales_[i] = Format::load_scale(operand_.scales, operand_.scales_dtype,
                                        scale_at_[i] + step * (kIsK ? 1 : operand_.row_scales));
      }
    }
  }

  const Operand& operand_;
  const char* from_[kPieces];  // the next pieces to copy
  int32_t end_k_[kPieces];     // a piece is in bounds in k-blocks that begin before
  uint32_t place_[kPieces];    // in a k-block in shared memory
  int32_t decoded_k_;          // begin of the next k-block to decode
  uint32_t scale_at_[kPieces];
  uint32_t scales_[kPieces] = {};  // bits of the next k-block's scales
};

template <class Operand, class Element, int kSides, int kThreads>
  requires kIsPacked<Operand>
struct CopyOf<Operand, Element, kSides, kThreads> {
  using type = CopyPacked<typename Operand::Format, Operand::kMajor, Element, kSides, kThreads>;
};

}  // namespace anabranch::cuda::portable
