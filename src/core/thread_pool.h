// A private thread pool. Idle threads sleep, and a caller does not wait for threads that start late.
#pragma once

#include <condition_variable>
#include <mutex>

#include "core/threads.h"

namespace anabranch {

class ThreadPool {
 public:
  // The pool of this process. It is never destroyed: its threads sleep until the process ends.
  static ThreadPool& instance();

  // Runs the loop on the caller and on up to threads - 1 threads of the pool. Any number of callers may run loops
  // concurrently. Returns when all indices are done: the caller processes indices too, and then waits only for threads
  // that are still processing one.
  void run(Loop& loop, int threads);

 private:
  struct Job {
    Loop& loop;
    const int helpers;  // threads of the pool that may join
    int joined = 0;
    int inside = 0;  // threads of the pool that have joined and not yet left
    bool open = true;
    Job* next = nullptr;
    std::condition_variable left{};
  };

  void start_threads(int count);
  void help();
  void close(Job& job);

  std::mutex mutex_;
  std::condition_variable opened_;
  Job* first_open_ = nullptr;  // jobs that threads may join, oldest first
  int num_threads_ = 0;
};

}  // namespace anabranch
