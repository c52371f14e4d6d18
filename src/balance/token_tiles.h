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
  // So few tokens do not fill it unless each has a warp; and so few are better off in smaller blocks.
  static constexpr int64_t kVeryFewTokens = 512;
  static constexpr int64_t kFewTokens = 2048;

  int64_t sequences = 0;  // B
  int64_t tokens_per_sequence = 0;
  int64_t blocks_per_sequence = 0;
  int64_t step = 0;  // tokens of a round of a block
  int64_t rounds = 0;
  int64_t longer_blocks = 0;  // of a sequence, the first ones, which take a round more

  TokenTiles() = default;
  // Blocks of a multiple of `step` tokens, at most most_blocks or one a sequence. Rounds are dealt out evenly, to as
  // many blocks as there may be unless fewer with the same number of rounds do. Blocks that share a multiprocessor lie
  // a number of multiprocessors apart, as a rule: that the longer ones come first keeps two of them from sharing one.
  TokenTiles(int64_t num_tokens, int64_t num_sequences, int64_t round_tokens, int64_t most_blocks = kMostBlocks)
      : sequences(num_sequences), step(round_tokens) {
    if (num_tokens == 0) return;
    tokens_per_sequence = num_tokens / sequences;
    const int64_t most = most_blocks > sequences ? most_blocks / sequences : 1;
    const int64_t steps = (tokens_per_sequence + step - 1) / step;
    const int64_t most_rounds = (steps + most - 1) / most;
    blocks_per_sequence = steps % most_rounds == 0 ? steps / most_rounds : std::min(most, steps);
    rounds = steps / blocks_per_sequence;
    longer_blocks = steps % blocks_per_sequence;
  }

  AB_INLINE int64_t count() const { return sequences * blocks_per_sequence; }
  AB_INLINE int64_t begin(int64_t block) const {
    const int64_t sequence = sequence_of(block);
    return sequence * tokens_per_sequence + rounds_before(block - sequence * blocks_per_sequence) * step;
  }
  AB_INLINE int64_t end(int64_t block) const {
    const int64_t sequence = sequence_of(block);
    const int64_t end = rounds_before(block - sequence * blocks_per_sequence + 1) * step;
    return sequence * tokens_per_sequence + (end < tokens_per_sequence ? end : tokens_per_sequence);
  }

 private:
  // Blocks of a launch are below 2^31; a GPU takes many times longer to divide 64 bits.
  AB_INLINE int64_t sequence_of(int64_t block) const {
    return static_cast<uint32_t>(block) / static_cast<uint32_t>(blocks_per_sequence);
  }
  AB_INLINE int64_t rounds_before(int64_t block_of_sequence) const {
    return block_of_sequence * rounds + (block_of_sequence < longer_blocks ? block_of_sequence : longer_blocks);
  }
};

// Bytes of one statistic [blocks, E], of 4 bytes an element, in a workspace.
constexpr size_t partial_bytes(int64_t blocks, int64_t E) { return static_cast<size_t>(blocks * E * 4 + 63) / 64 * 64; }

// Of counts and sums, however a kernel cuts T tokens of B sequences: a block has a token at least.
constexpr size_t most_partials_bytes(int64_t T, int64_t B, int64_t E) {
  return 2 * partial_bytes(std::min(std::max(TokenTiles::kMostBlocks, B), T), E);
}

}  // namespace anabranch::cuda
