#include "core/threads.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <thread>

#ifdef ANABRANCH_OPENMP
#include <omp.h>
#endif

#include "core/ieee.h"
#include "core/structs.h"
#include "core/thread_pool.h"

namespace anabranch {
namespace {

bool forked_child = false;  // written while the child has a single thread

[[gnu::constructor]] void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { forked_child = true; });
}

}  // namespace

bool is_forked_child() { return forked_child; }

void Loop::run_indices(int thread) {
  const ScopedIeeeArithmetic ieee;
  for (int64_t i = next_++; i < count_; i = next_++) body_(context_, i, thread);
}

#ifdef ANABRANCH_OPENMP

namespace {

using Clock = std::chrono::steady_clock;

int64_t now() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

// OpenMP's threads spin for some milliseconds after a region, so a region that follows starts within a microsecond. But
// a region waits for all its threads. If another process has taken the CPU of one thread, the region takes a time slice
// longer, several milliseconds. The pool's threads start later, but never delay a loop in that way.
//
// The time lost by a region is its duration minus the sum of the work of its threads: if that is positive, one thread
// would have been as fast. A region was delayed if it lost more than the time that it takes to wake a thread on an idle
// machine. The pool then runs all loops for kPause times the lost time, so delayed regions cost at most about 1 /
// kPause of the total time.
constexpr int64_t kWakeUp = 200'000;  // ns
constexpr int64_t kPause = 32;
constexpr int64_t kMaxPause = 1'000'000'000;  // ns

std::atomic<int64_t> pause_end{0};  // on Clock, ns

void run_region(Loop& loop, int threads, int64_t start) {
  std::atomic<int64_t> worked{0};
#pragma omp parallel num_threads(threads)
  {
    const int64_t begin = now();
    loop.run_indices(omp_get_thread_num());
    worked += now() - begin;
  }
  const int64_t end = now();
  const int64_t lost = end - start - worked;
  if (lost > kWakeUp) pause_end = end + std::min(kPause * lost, kMaxPause);
}

}  // namespace

int default_threads() { return std::clamp(omp_get_max_threads(), 1, kMaxThreads); }

void run_loop(Loop& loop, int threads) {
  if (omp_get_active_level() >= omp_get_max_active_levels()) return loop.run_indices(0);  // in a caller's region
  const int64_t start = now();
  if (start < pause_end) return ThreadPool::instance().run(loop, threads);
  run_region(loop, threads, start);
}

#else

int default_threads() {
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, unsigned{kMaxThreads}));
}

void run_loop(Loop& loop, int threads) { ThreadPool::instance().run(loop, threads); }

#endif

}  // namespace anabranch
