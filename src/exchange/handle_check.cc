#include <cstring>

#include "core/status.h"
#include "exchange/handle.h"

namespace anabranch::exchange {
namespace {

// Whether the handle was written by this version of the library. Checked first: other versions have other fields.
ab_status check_version(int rank, const Handle& handle, const Handle& own) {
  if (std::memcmp(handle.magic, kHandleMagic, sizeof(kHandleMagic)) != 0) {
    return AB_INVALID("handles[%d]: got other bytes, expected those of ab_cuda_exchange_export", rank);
  }
  if (std::strncmp(handle.version, own.version, sizeof(own.version)) == 0) return ok();
  return error(AB_UNSUPPORTED, "handles[%d]: got a rank with anabranch %.24s, expected %.24s as on rank %d", rank,
               handle.version, own.version, own.rank);
}

ab_status check_place(int rank, const Handle& handle, const Handle& own) {
  if (handle.ranks != own.ranks) {
    return AB_INVALID("handles[%d]: got an exchange of %d ranks, expected %d", rank, handle.ranks, own.ranks);
  }
  if (handle.rank != rank) {
    return AB_INVALID("handles[%d]: got the handle of rank %d, expected that of rank %d", rank, handle.rank, rank);
  }
  if (rank == own.rank && (handle.id != own.id || !is_same_process(handle, own))) {
    return AB_INVALID("handles[%d]: got the handle of another exchange, expected that of this one", rank);
  }
  for (int b = 0; b < kBuffers; ++b) {
    if (handle.buffer_bytes[b] == own.buffer_bytes[b]) continue;
    return AB_INVALID("handles[%d]: got %lld bytes in buffer %d, expected %lld as on rank %d", rank,
                      static_cast<long long>(handle.buffer_bytes[b]), b, static_cast<long long>(own.buffer_bytes[b]),
                      own.rank);
  }
  return ok();
}

ab_status check_reach(int rank, const Handle& handle, const Handle& own) {
  if (is_same_process(handle, own)) return ok();
  if (own.boot[0] == '\0' || handle.boot[0] == '\0') {
    return error(AB_UNSUPPORTED,
                 "exchange: rank %d is in another process, and a boot id that tells hosts apart cannot be read", rank);
  }
  if (std::strncmp(handle.boot, own.boot, sizeof(own.boot)) != 0) {
    return error(AB_UNSUPPORTED, "exchange: rank %d is on another host: got %.64s, expected %.64s as rank %d", rank,
                 handle.host, own.host, own.rank);
  }
  return ok();
}

}  // namespace

ab_status check_handles(const void* given, size_t bytes, const Handle& own, Handle (&handles)[kMaxRanks]) {
  const size_t needed = static_cast<size_t>(own.ranks) * AB_EXCHANGE_HANDLE_BYTES;
  if (given == nullptr) return AB_INVALID("handles: got NULL, expected the handles of all ranks");
  if (bytes != needed) {
    return AB_INVALID("handles: got %zu bytes, expected %zu, %d for each of %d ranks", bytes, needed,
                      AB_EXCHANGE_HANDLE_BYTES, own.ranks);
  }
  for (int r = 0; r < own.ranks; ++r) {
    std::memcpy(&handles[r], static_cast<const char*>(given) + r * AB_EXCHANGE_HANDLE_BYTES, sizeof(Handle));
    AB_RETURN_IF_ERROR(check_version(r, handles[r], own));
  }
  for (int r = 0; r < own.ranks; ++r) AB_RETURN_IF_ERROR(check_place(r, handles[r], own));
  for (int r = 0; r < own.ranks; ++r) AB_RETURN_IF_ERROR(check_reach(r, handles[r], own));
  for (int r = 0; r < own.ranks; ++r) {
    for (int other = 0; other < r; ++other) {
      if (std::memcmp(handles[r].device, handles[other].device, sizeof(own.device)) == 0) {
        return error(AB_UNSUPPORTED, "exchange: ranks %d and %d are on one device (%.16s), expected a device per rank",
                     other, r, handles[r].pci);
      }
    }
  }
  return ok();
}

}  // namespace anabranch::exchange
