// Statistics over tokens. One kernel writes the statistics of each block of tokens; a second kernel adds the blocks in
// order, so the result depends on the shape alone.
#pragma once

#include <cstdint>

#include "balance/token_tiles.h"
#include "core/cuda/launch.h"
#include "core/cuda/warp.cuh"

namespace anabranch::cuda {

// Statistics [blocks, E] of each block, in a workspace; or the results themselves if each sequence is one block.
struct Partials {
  int32_t* counts = nullptr;
  float* sums = nullptr;
};

// Places the partials in `workspace` (nullptr: only measures); returns their size in bytes.
inline size_t place_partials(const TokenTiles& tiles, int64_t E, int32_t* counts, float* sums, void* workspace,
                             Partials* partials) {
  *partials = {counts, sums};
  if (tiles.blocks_per_sequence <= 1) return 0;
  static_assert(sizeof(*counts) == 4 && sizeof(*sums) == 4, "one copy moves counts and sums as 4-byte words");
  const size_t bytes = partial_bytes(tiles.count(), E);
  char* memory = static_cast<char*>(workspace);
  if (counts != nullptr) partials->counts = reinterpret_cast<int32_t*>(memory);
  if (counts != nullptr && memory != nullptr) memory += bytes;
  if (sums != nullptr) partials->sums = reinterpret_cast<float*>(memory);
  return (counts != nullptr ? bytes : 0) + (sums != nullptr ? bytes : 0);
}

// Enqueues the sums over the blocks of each sequence: counts [B, E], and sums [B, E] with float64 accumulators. Does
// nothing if each sequence is one block. Writes zeros if there are no tokens.
ab_status add_block_statistics(const TokenTiles& tiles, int64_t E, const Partials& partials, int32_t* counts,
                               float* sums, cudaStream_t stream);

}  // namespace anabranch::cuda
