// What tells processes and hosts apart.
#pragma once

#include "exchange/handle.h"

namespace anabranch::cuda {

// Fills the fields of a handle that describe this process and its host.
ab_status describe_process(exchange::Handle* handle);

}  // namespace anabranch::cuda
