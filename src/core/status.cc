#include "core/status.h"

#include <cstdarg>
#include <cstdio>

namespace anabranch {

ab_status ok() {
  ab_status status;
  status.code = AB_OK;
  status.message[0] = '\0';
  return status;
}

ab_status error(ab_status_code code, const char* format, ...) {
  ab_status status;
  status.code = code;
  va_list args;
  va_start(args, format);
  std::vsnprintf(status.message, sizeof(status.message), format, args);
  va_end(args);
  return status;
}

}  // namespace anabranch
