// The thread pool when threads cannot start, start late, or serve several callers at once.
#include "core/threads.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <thread>
#include <utility>
#include <vector>

#include "anabranch/balance.h"
#include "support.h"

constexpr int kUnlimited = 1 << 30;
static std::atomic<int> threads_left{kUnlimited};
static std::atomic<bool> threads_held{false};

// Replaces pthread_create. Starts at most threads_left threads, which wait while threads_held is true.
extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t* thread,
                                                                     const pthread_attr_t* attributes,
                                                                     void* (*function)(void*), void* argument) {
  using Create = decltype(&pthread_create);
  using Start = std::pair<void* (*)(void*), void*>;
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_left-- <= 0) return EAGAIN;
  if (!threads_held) return create(thread, attributes, function, argument);
  const auto wait = [](void* memory) {
    const Start start = *static_cast<Start*>(memory);
    delete static_cast<Start*>(memory);
    threads_held.wait(true);
    return start.first(start.second);
  };
  return create(thread, attributes, wait, new Start(function, argument));
}

namespace anabranch::testing {
namespace {

bool sums_on_threads() {
  const Tensor<float> scores({4096, 3}, std::vector<float>(4096 * 3, 0.5f));
  const Tensor<float> sum({3});
  const ab_score_sum_args args{sizeof(args), scores.view(), sum.view()};
  EXPECT_OK(call(ab_score_sum, ab_score_sum_workspace, args, 4));
  return sum.values() == std::vector<float>(3, 2048.0f);
}

TEST(Fork, ChildRunsSerially) {
  ASSERT_TRUE(sums_on_threads());
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // ends the child if it hangs
    _exit(sums_on_threads() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  EXPECT_TRUE(sums_on_threads());
}

// Runs parallel_for on this program's own pool and checks that each index is visited once.
void expect_loop(int threads, int64_t count, int max_helpers) {
  std::vector<std::atomic<int>> done(static_cast<size_t>(count));
  parallel_for(threads, count, [&](int64_t i, int thread) {
    EXPECT_LE(thread, max_helpers);
    ++done[static_cast<size_t>(i)];
  });
  for (const std::atomic<int>& times : done) EXPECT_EQ(times, 1);
}

TEST(ThreadPool, UsesTheThreadsThatStart) {
  for (const int started : {0, 1, 3}) {
    threads_left = started == 3 ? 2 : started;  // one thread has already started
    expect_loop(8, 1000, started);
    threads_left = kUnlimited;
  }
}

TEST(ThreadPool, DoesNotWaitForThreadsThatStartLate) {
  threads_held = true;
  alarm(20);  // ends the test if the loop waits for them
  expect_loop(16, 1000, 15);
  alarm(0);
  threads_held = false;
  threads_held.notify_all();
}

TEST(ThreadPool, ServesCallersAtOnce) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([] {
      for (int64_t count = 1; count < 200; ++count) expect_loop(3, count, 2);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace anabranch::testing
