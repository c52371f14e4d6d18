// The registry of this process.
#pragma once

#include "exchange/registry.h"

namespace anabranch::cuda {

exchange::Registry& registry();

}  // namespace anabranch::cuda
