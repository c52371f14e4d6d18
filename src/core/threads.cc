#include "core/threads.h"

#include <pthread.h>

namespace anabranch {
namespace {

bool forked_child = false;  // written where there is one thread

[[gnu::constructor]] void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { forked_child = true; });
}

}  // namespace

bool is_forked_child() { return forked_child; }

}  // namespace anabranch
