// Sizes that the expert kernels index in int32.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/status.h"

namespace anabranch::cuda {

// Upper bound on rows, experts, columns, the contraction and tiles: a kernel may index one tile or one grid further.
constexpr int64_t kMaxCount = (int64_t{1} << 30) - 1;

struct Count {
  const char* name;
  int64_t value;
};

inline ab_status check_counts(std::initializer_list<Count> counts) {
  for (const Count& count : counts) {
    if (count.value <= kMaxCount) continue;
    return error(AB_UNSUPPORTED, "%s: got %lld, expected fewer than 2^30 on a GPU", count.name,
                 static_cast<long long>(count.value));
  }
  return ok();
}

}  // namespace anabranch::cuda
