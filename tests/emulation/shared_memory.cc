#include "shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <mutex>

namespace emulation {
namespace {

struct Mapping {
  size_t bytes;
  int file;  // -1: of another process
};
std::mutex mutex;
std::map<const void*, Mapping> mappings;

void* map(int file, size_t bytes, bool is_own) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  std::lock_guard lock(mutex);
  mappings[memory] = {bytes, is_own ? file : -1};
  return memory;
}

}  // namespace

void* allocate_shared(size_t bytes) {
  const int file = memfd_create("emulated", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return nullptr;
  return map(file, bytes, true);
}

bool export_shared(const void* memory, char* handle) {
  std::lock_guard lock(mutex);
  const auto found = mappings.find(memory);
  if (found == mappings.end() || found->second.file < 0) return false;
  std::snprintf(handle, 64, "/proc/%d/fd/%d %zu", getpid(), found->second.file, found->second.bytes);
  return true;
}

void* open_shared(const char* handle) {
  char path[48];
  size_t bytes = 0;
  if (std::sscanf(handle, "%47s %zu", path, &bytes) != 2) return nullptr;
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* const memory = map(file, bytes, false);
  close(file);
  return memory;
}

bool free_shared(void* memory) {
  std::lock_guard lock(mutex);
  const auto found = mappings.find(memory);
  if (found == mappings.end()) return false;
  munmap(memory, found->second.bytes);
  if (found->second.file >= 0) close(found->second.file);
  mappings.erase(found);
  return true;
}

}  // namespace emulation
