// What the forward kernels on CUDA keep of every token where its cutoff is counted, in a workspace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anabranch::cuda {

// Of a token: its cutoff, NaN for a masked one, and what makes softmax scores of its logits (row.cuh).
struct alignas(16) TokenScale {
  float cutoff;
  float shift;
  float factor;
};

constexpr size_t token_scale_bytes(int64_t T) { return (static_cast<size_t>(T) * sizeof(TokenScale) + 63) / 64 * 64; }

}  // namespace anabranch::cuda
