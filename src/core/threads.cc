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

bool forked_child = false;  // written while the child has one thread

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

// OpenMP's threads spin for some milliseconds after a region, ours or the framework's, and then start within a
// microsecond. But a region waits for all its threads. Where another process has taken the processor of one, the region
// lasts a time slice longer, several milliseconds. The pool's threads start later, and never hold up a loop that way.
//
// A region loses the time that it takes longer than its threads work together: one thread would have been as fast. It
// was held up if that is more than waking a thread on a calm machine takes. For kPause times the time lost the pool
// runs all loops, so regions that are held up cost about 1 / kPause of the time at most.
constexpr int64_t kWakeUp = 200'000;  // ns
constexpr int64_t kPause = 32;
constexpr int64_t kLongestPause = 1'000'000'000;  // ns

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
  if (lost > kWakeUp) pause_end = end + std::min(kPause * lost, kLongestPause);
}

}  // namespace

int default_threads() { return std::clamp(omp_get_max_threads(), 1, kMostThreads); }

void run_loop(Loop& loop, int threads) {
  if (omp_get_active_level() >= omp_get_max_active_levels()) return loop.run_indices(0);  // in a region of the caller's
  const int64_t start = now();
  if (start < pause_end) return ThreadPool::instance().run(loop, threads);
  run_region(loop, threads, start);
}

#else

int default_threads() {
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, unsigned{kMostThreads}));
}

void run_loop(Loop& loop, int threads) { ThreadPool::instance().run(loop, threads); }

#endif

}  // namespace anabranch
