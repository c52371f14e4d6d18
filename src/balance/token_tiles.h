// How the tokens of a launch on CUDA are cut into blocks, and how large the statistics of all blocks are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/inline.h"

namespace anabranch::cuda {

// The tokens of a launch, cut into blocks that never cross a sequence.
struct TokenTiles {
  // Of a large device. A constant: the device must not show in the results.
  static constexpr int64_t kMultiprocessors = 132;
  static constexpr int64_t kMostBlocks = 3 * kMultiprocessors;
  // So few tokens do not fill it unless each has a warp.
  static constexpr int64_t kFewTokens = 2048;

  int64_t sequences = 0;  // B
  int64_t tokens_per_sequence = 0;
  int64_t blocks_per_sequence = 0;
  int64_t tokens_per_block = 0;

  TokenTiles() = default;
  // Blocks of a multiple of `step` tokens, at most most_blocks or one a sequence.
  TokenTiles(int64_t num_tokens, int64_t num_sequences, int64_t step, int64_t most_blocks = kMostBlocks)
      : sequences(num_sequences) {
    if (num_tokens == 0) return;
    tokens_per_sequence = num_tokens / sequences;
    const int64_t most = most_blocks > sequences ? most_blocks / sequences : 1;
    const int64_t steps = (tokens_per_sequence + step - 1) / step;
    tokens_per_block = (steps + most - 1) / most * step;
    blocks_per_sequence = (tokens_per_sequence + tokens_per_block - 1) / tokens_per_block;
  }

  AB_INLINE int64_t count() const { return sequences * blocks_per_sequence; }
  AB_INLINE int64_t begin(int64_t block) const {
    return block / blocks_per_sequence * tokens_per_sequence + block % blocks_per_sequence * tokens_per_block;
  }
  AB_INLINE int64_t end(int64_t block) const {
    const int64_t limit = (block / blocks_per_sequence + 1) * tokens_per_sequence;
    const int64_t end = begin(block) + tokens_per_block;
    return end < limit ? end : limit;
  }
};

// Bytes of one statistic [blocks, E], of 4 bytes an element, in a workspace.
constexpr size_t partial_bytes(int64_t blocks, int64_t E) { return static_cast<size_t>(blocks * E * 4 + 63) / 64 * 64; }

// Of counts and sums, however a kernel cuts T tokens of B sequences: a block has a token at least.
constexpr size_t most_partials_bytes(int64_t T, int64_t B, int64_t E) {
  return 2 * partial_bytes(std::min(std::max(TokenTiles::kMostBlocks, B), T), E);
}

}  // namespace anabranch::cuda
