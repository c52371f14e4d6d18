// Tests of OpenMP: a thread that other processes hold up, and calls inside the caller's parallel regions.
#include <gtest/gtest.h>
#include <omp.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>
#include <vector>

#include "anabranch/balance.h"
#include "support.h"

namespace anabranch::testing {
namespace {

using Clock = std::chrono::steady_clock;

// Returns column sums whose bits depend on the order of the additions.
std::vector<float> column_sums(int threads) {
  const int64_t T = 4096;
  std::vector<float> values(static_cast<size_t>(T * 3));
  for (size_t i = 0; i < values.size(); ++i) values[i] = 1.0f / static_cast<float>(i + 1);
  const Tensor<float> scores({T, 3}, values);
  const Tensor<float> sum({3});
  const ab_score_sum_args args{sizeof(args), scores.view(), sum.view()};
  EXPECT_OK(call(ab_score_sum, ab_score_sum_workspace, args, threads));
  return sum.values();
}

std::atomic<bool> held{false};
int release_pipe[2];

void wait_for_release(int) {
  char byte = 0;
  held = true;
  while (read(release_pipe[0], &byte, 1) != 1) {
  }
  held = false;
}

// Stops an OpenMP thread inside a signal handler, as if another process had taken its processor.
void hold(pthread_t thread) {
  ASSERT_EQ(pthread_kill(thread, SIGUSR1), 0);
  while (!held) std::this_thread::yield();
}

void release() {
  ASSERT_EQ(write(release_pipe[1], "", 1), 1);
  while (held) std::this_thread::yield();
}

TEST(OpenMp, AHeldThreadDelaysOneCallOnly) {
  constexpr std::chrono::milliseconds kHeld{50};
  ASSERT_EQ(pipe(release_pipe), 0);
  std::signal(SIGUSR1, wait_for_release);
  pthread_t second{};
#pragma omp parallel num_threads(2)
  if (omp_get_thread_num() == 1) second = pthread_self();

  const std::vector<float> want = column_sums(1);
  Clock::duration lasted{};
  while (lasted < kHeld / 2) {  // repeat until a call has used OpenMP
    hold(second);
    std::thread later([&] {
      std::this_thread::sleep_for(kHeld);
      release();
    });
    const Clock::time_point start = Clock::now();
    EXPECT_EQ(column_sums(2), want);
    lasted = Clock::now() - start;
    later.join();
  }
  hold(second);
  alarm(20);  // ends the test if the call waits for the held thread
  EXPECT_EQ(column_sums(2), want);
  alarm(0);
  release();
}

TEST(OpenMp, CallsInRegionsHaveTheSameBits) {
  const std::vector<float> want = column_sums(1);
  for (const int levels : {1, 2}) {  // levels of nested regions that may have more than one thread
    omp_set_max_active_levels(levels);
    for (int i = 0; i < 20; ++i) {
#pragma omp parallel num_threads(3)
      for (const int threads : {0, 2, 3}) EXPECT_EQ(column_sums(threads), want);
    }
  }
}

}  // namespace
}  // namespace anabranch::testing
