// Fixed blocks of tokens. Sums over tokens are computed per block, and the blocks are added in order, so the result
// depends on the shape alone and never on the number of threads. A block is always within one sequence.
#pragma once

#include <cstdint>

namespace anabranch {

struct TokenBlocks {
  static constexpr int64_t kTokens = 128;

  int64_t sequences;            // B
  int64_t tokens_per_sequence;  // T / B
  int64_t blocks_per_sequence;

  TokenBlocks(int64_t num_tokens, int64_t num_sequences)
      : sequences(num_sequences),
        tokens_per_sequence(num_sequences == 0 ? 0 : num_tokens / num_sequences),
        blocks_per_sequence((tokens_per_sequence + kTokens - 1) / kTokens) {}

  int64_t count() const { return sequences * blocks_per_sequence; }
  int64_t begin(int64_t block) const {
    return block / blocks_per_sequence * tokens_per_sequence + block % blocks_per_sequence * kTokens;
  }
  int64_t end(int64_t block) const {
    const int64_t limit = (block / blocks_per_sequence + 1) * tokens_per_sequence;
    const int64_t end = begin(block) + kTokens;
    return end < limit ? end : limit;
  }
};

}  // namespace anabranch
