// Processes and threads that are not there: a child of a fork has none of its parent's, and the system may give no
// more.
#include "core/threads.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "anabranch/balance.h"
#include "support.h"

constexpr int kUnlimited = 1 << 30;
static std::atomic<int> threads_left{kUnlimited};

// In place of the system's: at most so many threads.
extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t* thread,
                                                                     const pthread_attr_t* attributes,
                                                                     void* (*function)(void*), void* argument) {
  using Create = decltype(&pthread_create);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return threads_left-- > 0 ? create(thread, attributes, function, argument) : EAGAIN;
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

TEST(Fork, LeavesAChildThatRunsSerially) {
  ASSERT_TRUE(sums_on_threads());
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a hang ends here
    _exit(sums_on_threads() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  EXPECT_TRUE(sums_on_threads());
}

// With threads of the standard library; OpenMP's ends the process where it cannot start one.
TEST(ParallelFor, IsDoneByTheThreadsThatStart) {
  for (const int started : {0, 1, 3}) {
    std::vector<std::atomic<int>> done(1000);
    threads_left = started;
    parallel_for(8, 1000, [&](int64_t i, int thread) {
      EXPECT_LE(thread, started);
      ++done[static_cast<size_t>(i)];
    });
    threads_left = kUnlimited;
    for (const std::atomic<int>& times : done) EXPECT_EQ(times, 1);
  }
}

}  // namespace
}  // namespace anabranch::testing
