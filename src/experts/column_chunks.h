// The number of columns per chunk, for rows that are computed and summed per token in chunks of columns.
#pragma once

#include <algorithm>
#include <cstdint>

namespace anabranch {

// Returns the columns per chunk of rows [R, N] = rows [R, D] times weights [E, D, N]. backward: rows are gradients.
//
// The GEMM reads its input rows once per chunk, so chunks should be few. But the buffer of rows adds to peak memory,
// unless it only takes memory that a later buffer needs anyway. In the backward pass of the layer, dh W_in^T comes
// before the gradient of W_in, so the rows may be as large as W_in. In the forward pass, the gradients of W_out and of
// W_in, which is twice as large for gated experts, are still to come: if `a` [R, D] fits into the gradient of W_out,
// the rows may take the space of the gradient of W_in, else the other way round. All chunks but the last have the same
// number of whole tiles; the last may be narrower.
//
// tile_columns: columns of the tiles that the GEMM uses.
inline int64_t chunk_columns(int64_t R, int64_t E, int64_t N, int64_t D, bool backward, int64_t tile_columns = 192) {
  constexpr int64_t kMinTiles = 4;                    // per chunk, on average
  constexpr int64_t kMinColumns = 2048;               // narrower rows are not split: a second chunk would cost too much
  constexpr int64_t kSmallBuffer = int64_t{1} << 22;  // elements: below this, launches matter more than memory
  const bool in_w_in = !backward && R <= E * N;
  const double w = (in_w_in ? 2.0 : 1.0) * static_cast<double>(E) * static_cast<double>(D) * static_cast<double>(N);
  const double columns = std::max(w, static_cast<double>(kSmallBuffer)) / static_cast<double>(std::max<int64_t>(R, 1));
  if (N < kMinColumns || columns >= static_cast<double>(N)) return N;
  const int64_t tiles = (N + tile_columns - 1) / tile_columns;
  const int64_t fitting = std::max(static_cast<int64_t>(columns / static_cast<double>(tile_columns)), int64_t{1});
  const int64_t chunks = std::min((tiles + fitting - 1) / fitting, tiles / kMinTiles);
  return std::min((tiles + chunks - 1) / chunks * tile_columns, N);
}

}  // namespace anabranch
