// How many columns of rows stand in memory at a time where rows are summed by token as they are computed.
#pragma once

#include <algorithm>
#include <cstdint>

namespace anabranch {

// Columns of a chunk of rows [R, N], which are rows [R, D] times weights [E, D, N]; backward: they are gradients.
//
// The product reads its rows again for every chunk, so chunks are few. But the buffer of rows adds to the peak of the
// memory, unless it stands where something else will: in the layer's backward pass dh W_in^T comes before the gradient
// of W_in, so rows may be as large as W_in. In the forward pass there will be
// both gradients, of W_out and, where experts are gated, of W_in, which is twice as large; where `a`, [R, D],
// stands in the first, rows may take the second, else the other way round. Chunks are whole tiles, all alike but the
// last, which may be narrow.
//
// tile_columns: of the tiles that the product takes, if nothing is left over.
inline int64_t chunk_columns(int64_t R, int64_t E, int64_t N, int64_t D, bool backward, int64_t tile_columns = 192) {
  constexpr int64_t kFewestTiles = 4;                 // of a chunk, in the mean
  constexpr int64_t kFewestColumns = 2048;            // of rows that are cut: of fewer, a chunk more costs too much
  constexpr int64_t kSmallBuffer = int64_t{1} << 22;  // elements: not worth cutting, since launches count, not memory
  const bool in_w_in = !backward && R <= E * N;
  const double w = (in_w_in ? 2.0 : 1.0) * static_cast<double>(E) * static_cast<double>(D) * static_cast<double>(N);
  const double room = std::max(w, static_cast<double>(kSmallBuffer)) / static_cast<double>(std::max<int64_t>(R, 1));
  if (N < kFewestColumns || room >= static_cast<double>(N)) return N;
  const int64_t tiles = (N + tile_columns - 1) / tile_columns;
  const int64_t fitting = std::max(static_cast<int64_t>(room / static_cast<double>(tile_columns)), int64_t{1});
  const int64_t chunks = std::min((tiles + fitting - 1) / fitting, tiles / kFewestTiles);
  return std::min((tiles + chunks - 1) / chunks * tile_columns, N);
}

}  // namespace anabranch
