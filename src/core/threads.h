// Loops over CPU threads. Each index owns its output, so results do not depend on which thread runs it.
#pragma once

#include <atomic>
#include <cstdint>

#include "anabranch/types.h"

namespace anabranch {

// Whether this process was forked from a process that had loaded the library. A child has none of its parent's threads.
bool is_forked_child();

// OpenMP's default number of threads, or the number of CPUs in a build without OpenMP.
int default_threads();

// The number of threads that exec requests.
inline int num_threads(const ab_exec* exec) { return exec->num_threads > 0 ? exec->num_threads : default_threads(); }

// A loop whose threads take its indices one at a time, in order.
class Loop {
 public:
  using Body = void (*)(const void* context, int64_t index, int thread);

  Loop(int64_t count, Body body, const void* context) : count_(count), body_(body), context_(context) {}

  int64_t count() const { return count_; }
  void run_indices(int thread);  // until no index is left

 private:
  const int64_t count_;
  const Body body_;
  const void* const context_;
  std::atomic<int64_t> next_{0};
};

// Runs all indices of the loop on at most `threads` threads; the caller is thread 0.
void run_loop(Loop& loop, int threads);

// Calls body(index, thread) once for each 0 <= index < count, in any order, on at most `threads` threads,
// 0 <= thread < threads. A forked child runs on one thread. A body must not throw.
template <class Body>
void parallel_for(int threads, int64_t count, const Body& body) {
  if (threads <= 1 || count <= 1 || is_forked_child()) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  Loop loop(
      count,
      [](const void* context, int64_t index, int thread) { (*static_cast<const Body*>(context))(index, thread); },
      &body);
  run_loop(loop, threads < count ? threads : static_cast<int>(count));
}

}  // namespace anabranch
