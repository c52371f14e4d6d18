// The columns in which sums return to their source ranks, one chunk while the next one is computed.
#pragma once

#include <algorithm>
#include <cstdint>

namespace anabranch::exchange {

// The columns of a chunk of sums [P T, D]; the last one may have fewer. More chunks hide more of the transfer, and cost
// time in the GEMM that computes them. All calls on the sums have these arguments, so they agree on the chunks.
inline int64_t return_columns(int64_t ranks, int64_t T, int64_t D, int64_t element_bytes) {
  constexpr int64_t kStep = 256;  // whole tiles of the GEMM
  const int64_t bytes = (ranks - 1) * T * D * element_bytes;
  const int64_t chunks = bytes > (int64_t{192} << 20)  ? 4
                         : bytes > (int64_t{48} << 20) ? 3
                         : bytes > (int64_t{16} << 20) ? 2
                                                       : 1;
  const int64_t columns = (D + chunks - 1) / chunks;
  return std::min((columns + kStep - 1) / kStep * kStep, D);
}

}  // namespace anabranch::exchange
