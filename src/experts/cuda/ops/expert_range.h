// A range of experts.
#pragma once

#include <cstdint>

namespace anabranch::cuda {

// The experts whose rows a GEMM computes. The range that ends with the last expert includes the rows after the groups.
struct ExpertRange {
  int64_t first = 0;
  int64_t end = INT64_MAX;
};

}  // namespace anabranch::cuda
