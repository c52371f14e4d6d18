// Loops over CPU threads. Which thread runs which index never shows in a result: an index owns what it writes.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef ANABRANCH_OPENMP
#include <omp.h>
#else
#include <atomic>
#include <exception>
#include <thread>
#include <vector>
#endif

#include "anabranch/types.h"
#include "core/ieee.h"
#include "core/structs.h"

namespace anabranch {

// Whether this process was forked off one that had loaded the library. Threads do not follow into a child, and OpenMP
// waits forever there for those of its pool.
bool is_forked_child();

inline int default_threads() {
#ifdef ANABRANCH_OPENMP
  return std::clamp(omp_get_max_threads(), 1, kMostThreads);
#else
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, unsigned{kMostThreads}));
#endif
}

// Threads that exec asks for.
inline int num_threads(const ab_exec* exec) { return exec->num_threads > 0 ? exec->num_threads : default_threads(); }

// Calls body(index, thread) for 0 <= index < count, each once, in any order, on at most `threads` threads,
// 0 <= thread < threads; on one in the child of a fork. A body must not throw.
template <class Body>
void parallel_for(int threads, int64_t count, const Body& body) {
  if (threads > count) threads = static_cast<int>(count);
  if (threads <= 1 || is_forked_child()) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
#ifdef ANABRANCH_OPENMP
#pragma omp parallel num_threads(threads)
  {
    const ScopedIeeeArithmetic ieee;
    const int thread = omp_get_thread_num();
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < count; ++i) body(i, thread);
  }
#else
  std::atomic<int64_t> next{0};
  const auto work = [&](int thread) {
    const ScopedIeeeArithmetic ieee;
    for (int64_t i = next++; i < count; i = next++) body(i, thread);
  };
  std::vector<std::thread> others;
  try {
    others.reserve(static_cast<size_t>(threads - 1));
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  } catch (const std::exception&) {
    // No memory, or no thread more: those that have started do it.
  }
  work(0);
  for (std::thread& other : others) other.join();
#endif
}

}  // namespace anabranch
