// Exchanges connect GPUs: calls on a CPU refuse them.
#pragma once

#include "anabranch/types.h"
#include "core/status.h"

namespace anabranch {

inline ab_status check_no_exchange(const char* name, const ab_exchange* exchange) {
  return exchange == nullptr ? ok() : AB_INVALID("%s: got an exchange, expected NULL on a CPU", name);
}

}  // namespace anabranch
