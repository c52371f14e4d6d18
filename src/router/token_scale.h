// Values that the CUDA forward kernels save per token, in the workspace, for the histogram of quantile balancing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anabranch::cuda {

// Per token: its threshold, NaN if masked, and the parameters that convert logits to softmax scores (row.cuh).
struct alignas(16) TokenScale {
  float threshold;
  float shift;
  float factor;
};

constexpr size_t token_scale_bytes(int64_t T) { return (static_cast<size_t>(T) * sizeof(TokenScale) + 63) / 64 * 64; }

}  // namespace anabranch::cuda
