#include "exchange/cuda/identity.h"

#include <sys/random.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/status.h"

namespace anabranch::cuda {
namespace {

// A process id is not enough: processes in two containers of one host may have the same. A forked child draws again.
ab_status draw_process_number(uint64_t (&number)[2], int64_t* pid) {
  static std::mutex mutex;
  static uint64_t drawn[2];
  static int64_t drawn_by = -1;
  std::lock_guard lock(mutex);
  if (drawn_by != getpid()) {
    if (getrandom(drawn, sizeof(drawn), 0) != static_cast<ssize_t>(sizeof(drawn))) {
      return error(AB_INTERNAL, "exchange: getrandom failed");
    }
    drawn_by = getpid();
  }
  std::memcpy(number, drawn, sizeof(drawn));
  *pid = drawn_by;
  return ok();
}

// Linux draws the boot id when it starts. All containers of a host see the same one.
void read_boot_id(char (&boot)[40]) {
  boot[0] = '\0';
  std::FILE* const file = std::fopen("/proc/sys/kernel/random/boot_id", "r");
  if (file == nullptr) return;
  if (std::fscanf(file, "%39s", boot) != 1) boot[0] = '\0';
  std::fclose(file);
}

}  // namespace

ab_status describe_process(exchange::Handle* handle) {
  read_boot_id(handle->boot);
  if (gethostname(handle->host, sizeof(handle->host) - 1) != 0) std::strcpy(handle->host, "unknown");
  return draw_process_number(handle->process, &handle->pid);
}

}  // namespace anabranch::cuda
