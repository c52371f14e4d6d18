// Loops over CPU threads. Which thread runs which index never shows in a result: an index owns what it writes.
#pragma once

#include <cfenv>
#include <cstdint>

#ifdef ANABRANCH_OPENMP
#include <omp.h>
#else
#include <atomic>
#include <thread>
#include <vector>
#endif

#include "anabranch/types.h"

namespace anabranch {

// IEEE arithmetic (denormals kept, round to nearest) inside the scope, whatever the calling framework has set for its
// own threads: XLA flushes denormals on the thread that calls us, but not on ours.
class ScopedIeeeArithmetic {
 public:
  ScopedIeeeArithmetic() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~ScopedIeeeArithmetic() { std::fesetenv(&saved_); }
  ScopedIeeeArithmetic(const ScopedIeeeArithmetic&) = delete;
  ScopedIeeeArithmetic& operator=(const ScopedIeeeArithmetic&) = delete;

 private:
  std::fenv_t saved_;
};

inline int default_threads() {
#ifdef ANABRANCH_OPENMP
  return omp_get_max_threads();
#else
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
#endif
}

// Threads that exec asks for.
inline int num_threads(const ab_exec* exec) {
  return exec != nullptr && exec->num_threads > 0 ? exec->num_threads : default_threads();
}

// Calls body(index, thread) for 0 <= index < count, each once, in any order, on at most `threads` threads,
// 0 <= thread < threads. A body must not throw.
template <class Body>
void parallel_for(int threads, int64_t count, const Body& body) {
  if (threads > count) threads = static_cast<int>(count);
  if (threads <= 1) {
    const ScopedIeeeArithmetic ieee;
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
  others.reserve(static_cast<size_t>(threads - 1));
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
#endif
}

}  // namespace anabranch
