// A range of experts.
#pragma once

#include <algorithm>
#include <cstdint>

namespace anabranch::cuda {

// The experts whose rows a GEMM computes. The range that ends with the last expert includes the rows after the groups.
struct ExpertRange {
  int64_t first = 0;
  int64_t end = INT64_MAX;

  // Number of the E experts that it contains.
  int64_t count(int64_t E) const { return std::max<int64_t>(std::min(end, E) - first, 0); }
};

}  // namespace anabranch::cuda
