// Statuses with a message, and macros that return them.
#pragma once

#include "anabranch/types.h"

namespace anabranch {

ab_status ok();

__attribute__((format(printf, 2, 3))) ab_status error(ab_status_code code, const char* format, ...);

#define AB_INVALID(...) ::anabranch::error(AB_INVALID_ARGUMENT, __VA_ARGS__)

#define AB_RETURN_IF_ERROR(expression)               \
  do {                                               \
    const ab_status ab_status_ = (expression);       \
    if (ab_status_.code != AB_OK) return ab_status_; \
  } while (false)

}  // namespace anabranch
