#include "core/structs.h"

#include <algorithm>
#include <cstring>

namespace anabranch {
namespace {

constexpr size_t kMaxStructBytes = 4096;  // a struct of a larger size is an error and is not read

bool is_size_of_struct(size_t size, std::span<const size_t> sizes) {
  const size_t known = sizes.back();
  return size <= known ? std::ranges::find(sizes, size) != sizes.end() : size % 8 == 0 && size <= kMaxStructBytes;
}

}  // namespace

ab_status take_struct(const char* name, const void* given, std::span<const size_t> sizes, void* to) {
  if (given == nullptr) return AB_INVALID("%s: got NULL, expected a pointer to its arguments", name);
  const size_t known = sizes.back();
  size_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  if (!is_size_of_struct(size, sizes)) {
    return AB_INVALID("%s: got size %zu, expected %zu, %zu as in an older header, or a larger multiple of 8 up to %zu",
                      name, size, known, sizes.front(), kMaxStructBytes);
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
  if (to->num_threads < 0 || to->num_threads > kMaxThreads) {
    return AB_INVALID("exec: got num_threads %d, expected 0 (the default) to %d", to->num_threads, kMaxThreads);
  }
  return ok();
}

}  // namespace anabranch
