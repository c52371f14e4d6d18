// Splits the tokens of a CUDA launch into blocks, and computes the size of the statistics of all blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/inline.h"

namespace anabranch::cuda {

// The tokens of a launch, split into blocks that are each within one sequence.
struct TokenTiles {
  // The number of SMs of a large device. It is a constant because results must not depend on the device.
  static constexpr int64_t kMultiprocessors = 132;
  static constexpr int64_t kMaxBlocks = 3 * kMultiprocessors;
  // Up to kVeryFewTokens tokens fill the device only with one warp per token. Up to kFewTokens tokens run faster in
  // smaller blocks.
  static constexpr int64_t kVeryFewTokens = 512;
  static constexpr int64_t kFewTokens = 2048;

  int64_t sequences = 0;  // B
  int64_t tokens_per_sequence = 0;
  int64_t blocks_per_sequence = 0;
  int64_t step = 0;  // tokens per round of a block
  int64_t rounds = 0;
  int64_t longer_blocks = 0;  // the number of blocks, the first of each sequence, that process one more round

  TokenTiles() = default;
  // Splits each sequence into blocks of a multiple of `round_tokens` tokens: at most max_blocks blocks, but at least
  // one per sequence. Rounds are distributed evenly over as many blocks as allowed, unless fewer blocks need the same
  // number of rounds. Blocks that share an SM usually have indices that differ by a multiple of the number of SMs. The
  // longer blocks come first, so that two of them do not share an SM.
  TokenTiles(int64_t num_tokens, int64_t num_sequences, int64_t round_tokens, int64_t max_blocks = kMaxBlocks)
      : sequences(num_sequences), step(round_tokens) {
    if (num_tokens == 0) return;
    tokens_per_sequence = num_tokens / sequences;
    const int64_t max_per_sequence = max_blocks > sequences ? max_blocks / sequences : 1;
    const int64_t steps = (tokens_per_sequence + step - 1) / step;
    const int64_t max_rounds = (steps + max_per_sequence - 1) / max_per_sequence;
    blocks_per_sequence = steps % max_rounds == 0 ? steps / max_rounds : std::min(max_per_sequence, steps);
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
  // A launch has fewer than 2^31 blocks; a 64-bit division takes many times longer on a GPU.
  AB_INLINE int64_t sequence_of(int64_t block) const {
    return static_cast<uint32_t>(block) / static_cast<uint32_t>(blocks_per_sequence);
  }
  AB_INLINE int64_t rounds_before(int64_t block_in_sequence) const {
    return block_in_sequence * rounds + (block_in_sequence < longer_blocks ? block_in_sequence : longer_blocks);
  }
};

// Bytes of one statistic [blocks, E] with 4-byte elements, in a workspace.
constexpr size_t partial_bytes(int64_t blocks, int64_t E) { return static_cast<size_t>(blocks * E * 4 + 63) / 64 * 64; }

// Upper bound for counts and sums, however a kernel splits T tokens of B sequences: each block has at least one token.
constexpr size_t max_partials_bytes(int64_t T, int64_t B, int64_t E) {
  return 2 * partial_bytes(std::min(std::max(TokenTiles::kMaxBlocks, B), T), E);
}

}  // namespace anabranch::cuda
