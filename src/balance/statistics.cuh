// Statistics over tokens: a kernel writes those of each block of tokens, and a second one adds the blocks up in order,
// so that the sums depend on the shape alone.
#pragma once

#include <cstdint>

#include "core/cuda/launch.h"
#include "core/cuda/warp.cuh"

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

  __host__ __device__ int64_t count() const { return sequences * blocks_per_sequence; }
  __device__ int64_t begin(int64_t block) const {
    return block / blocks_per_sequence * tokens_per_sequence + block % blocks_per_sequence * tokens_per_block;
  }
  __device__ int64_t end(int64_t block) const {
    const int64_t limit = (block / blocks_per_sequence + 1) * tokens_per_sequence;
    const int64_t end = begin(block) + tokens_per_block;
    return end < limit ? end : limit;
  }
};

// Statistics of each block [blocks, E] in a workspace, or the results themselves where a sequence is one block.
struct Partials {
  int32_t* counts = nullptr;
  float* sums = nullptr;
};

// Takes the memory off `workspace` (nullptr: only measures); returns its bytes.
inline size_t place_partials(const TokenTiles& tiles, int64_t E, int32_t* counts, float* sums, void* workspace,
                             Partials* partials) {
  *partials = {counts, sums};
  if (tiles.blocks_per_sequence <= 1) return 0;
  const size_t bytes = (static_cast<size_t>(tiles.count() * E) * sizeof(float) + 63) / 64 * 64;
  char* memory = static_cast<char*>(workspace);
  if (counts != nullptr) partials->counts = reinterpret_cast<int32_t*>(memory);
  if (counts != nullptr && memory != nullptr) memory += bytes;
  if (sums != nullptr) partials->sums = reinterpret_cast<float*>(memory);
  return (counts != nullptr ? bytes : 0) + (sums != nullptr ? bytes : 0);
}

// Adds the blocks of each sequence up: counts [B, E], sums [B, E], float64 on the way. Nothing to do where a sequence
// is one block; zeros where there is no token.
ab_status add_partials(const TokenTiles& tiles, int64_t E, const Partials& partials, int32_t* counts, float* sums,
                       cudaStream_t stream);

}  // namespace anabranch::cuda
