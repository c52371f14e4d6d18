// The number of threads for a call of the router.
#pragma once

#include <cstdint>

#include "core/threads.h"

namespace anabranch {

// Below this number of logits one thread finishes before a second has started.
constexpr int64_t kSerialLogits = 1 << 15;

inline int router_threads(const ab_exec* exec, int64_t T, int64_t E) {
  return T * E < kSerialLogits ? 1 : num_threads(exec);
}

}  // namespace anabranch
