#include "core/thread_pool.h"

#include <cstddef>
#include <exception>
#include <new>
#include <thread>

namespace anabranch {

ThreadPool& ThreadPool::instance() {
  alignas(ThreadPool) static std::byte memory[sizeof(ThreadPool)];
  static ThreadPool* const pool = new (memory) ThreadPool;
  return *pool;
}

void ThreadPool::run(Loop& loop, int threads) {
  Job job{loop, threads - 1};
  std::unique_lock lock(mutex_);
  start_threads(job.helpers);
  Job** end = &first_open_;
  while (*end != nullptr) end = &(*end)->next;
  *end = &job;
  lock.unlock();
  for (int i = 0; i < job.helpers; ++i) opened_.notify_one();

  loop.run_indices(0);

  lock.lock();
  close(job);
  job.left.wait(lock, [&] { return job.inside == 0; });
}

void ThreadPool::start_threads(int count) {
  try {
    for (; num_threads_ < count; ++num_threads_) std::thread(&ThreadPool::help, this).detach();
  } catch (const std::exception&) {
    return;  // no memory, or no more threads from the system: run the loop on fewer threads
  }
}

void ThreadPool::help() {
  std::unique_lock lock(mutex_);
  for (;;) {
    opened_.wait(lock, [&] { return first_open_ != nullptr; });
    Job& job = *first_open_;
    const int thread = ++job.joined;
    if (job.joined == job.helpers) close(job);
    ++job.inside;
    lock.unlock();
    job.loop.run_indices(thread);
    lock.lock();
    close(job);
    if (--job.inside == 0) job.left.notify_one();  // notify under the lock: the caller may return once the lock is free
  }
}

// Lets no more threads join the job.
void ThreadPool::close(Job& job) {
  if (!job.open) return;
  job.open = false;
  Job** at = &first_open_;
  while (*at != &job) at = &(*at)->next;
  *at = job.next;
}

}  // namespace anabranch
