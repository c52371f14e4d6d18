// How many columns of rows stand in memory at a time where rows are summed by token as they are computed.
#pragma once

#include <algorithm>
#include <cstdint>

namespace anabranch {

// Elements of a buffer that is not worth cutting: memory of small calls does not count, their launches do.
constexpr int64_t kSmallBuffer = int64_t{1} << 22;

// Columns of a chunk of rows [R, N], of which each element is a sum of so many terms; transposed: the weights are.
//
// The product reads its rows again for every chunk, so chunks are few; but the buffer adds to the peak of the memory.
// It may have the size of what the layer holds at its peak anyway, w a, [R, F]: the terms of the down product are F,
// those of dh W_in^T, which takes its weights transposed, 2 F where experts are gated. Chunks are whole tiles, as equal
// as they can be.
inline int64_t chunk_columns(int64_t R, int64_t N, int64_t terms, bool transposed) {
  constexpr int64_t kTileColumns = 256;  // of the widest tile
  const auto tiles = [](int64_t columns) { return std::max<int64_t>((columns + kTileColumns - 1) / kTileColumns, 1); };
  const int64_t hidden = transposed ? terms / 2 : terms;
  const int64_t most = std::max(tiles(hidden), kSmallBuffer / std::max<int64_t>(R, 1) / kTileColumns);
  const int64_t chunks = (tiles(N) + most - 1) / most;
  return std::min((tiles(N) + chunks - 1) / chunks * kTileColumns, N);
}

}  // namespace anabranch
