#include "core/structs.h"

#include <algorithm>
#include <cstring>

namespace anabranch {
namespace {

// More is the size of no struct, and not read.
constexpr size_t kMostBytes = 4096;

}  // namespace

ab_status take_struct(const char* name, const void* given, size_t oldest, size_t known, void* to) {
  if (given == nullptr) return AB_INVALID("%s: got NULL, expected a pointer to its arguments", name);
  size_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  if (size < oldest || size > kMostBytes) {
    return AB_INVALID("%s: got size %zu, expected %zu, or at least %zu of an older header", name, size, known, oldest);
  }
  const char* bytes = static_cast<const char*>(given);
  for (size_t i = known; i < size; ++i) {
    if (bytes[i] == 0) continue;
    return error(AB_UNSUPPORTED,
                 "%s: got size %zu with a value in byte %zu, expected zeros past the %zu bytes that "
                 "version %s knows",
                 name, size, i, known, ANABRANCH_VERSION);
  }
  std::memset(to, 0, known);
  std::memcpy(to, given, std::min(size, known));
  std::memcpy(to, &known, sizeof(known));
  return ok();
}

ab_status take_exec(const ab_exec* given, ab_exec* to) {
  if (given == nullptr) {
    *to = {sizeof(ab_exec), 0, nullptr, nullptr, 0};
    return ok();
  }
  AB_RETURN_IF_ERROR(take_struct(given, to));
  if (to->num_threads < 0 || to->num_threads > kMostThreads) {
    return AB_INVALID("exec: got num_threads %d, expected 0 (the default) to %d", to->num_threads, kMostThreads);
  }
  return ok();
}

}  // namespace anabranch
