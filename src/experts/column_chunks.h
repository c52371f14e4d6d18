// How many columns of rows stand in memory at a time where rows are summed by token as they are computed.
#pragma once

#include <algorithm>
#include <cstdint>

namespace anabranch {

// Columns of a chunk of rows [R, N], of which each element is a sum of so many terms, by weights of E experts;
// transposed: the weights are.
//
// The product reads its rows again for every chunk, so chunks are few, and never narrow. But the buffer of rows adds to
// the peak of the memory, unless it stands where something else will: in the layer the gradients of W_in and W_out come
// after it. So it may be as large as W_in, which dh W_in^T takes transposed, or as twice W_out, which is the same where
// experts are gated. Chunks are whole tiles, as equal as they can be.
inline int64_t chunk_columns(int64_t R, int64_t E, int64_t N, int64_t terms, bool transposed) {
  constexpr int64_t kTileColumns = 256;                // of the widest tile
  constexpr int64_t kNarrowest = 2048 / kTileColumns;  // in tiles: 1024 columns took 3 to 11% longer than all of 4096
  constexpr int64_t kSmallBuffer = int64_t{1} << 22;   // elements: not worth cutting, since launches count, not memory
  const auto tiles = [](int64_t columns) { return std::max<int64_t>((columns + kTileColumns - 1) / kTileColumns, 1); };
  const auto rows = static_cast<double>(std::max<int64_t>(R, 1));
  const double w_in = (transposed ? 1.0 : 2.0) * static_cast<double>(E) * static_cast<double>(terms);
  const double room = std::max(w_in / rows * static_cast<double>(N), static_cast<double>(kSmallBuffer) / rows);
  if (room >= static_cast<double>(N)) return N;
  const int64_t most = std::max(static_cast<int64_t>(room / kTileColumns), kNarrowest);
  const int64_t chunks = (tiles(N) + most - 1) / most;
  return std::min((tiles(N) + chunks - 1) / chunks * kTileColumns, N);
}

}  // namespace anabranch
