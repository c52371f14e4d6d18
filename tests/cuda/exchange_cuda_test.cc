// Exchanges between the GPUs of this machine: in one process and in a process per GPU. With fewer than two GPUs these
// tests skip and say so.
#include <gtest/gtest.h>

#include <deque>
#include <thread>

#include "exchange_ranks.h"
#include "processes.h"

namespace anabranch::testing {
namespace {

int count_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  cudaGetLastError();
  return std::min(count, AB_EXCHANGE_MAX_RANKS);
}

// Ranks of one process.
class LocalRanks {
 public:
  // Rank r is on device r, or in the opposite order.
  explicit LocalRanks(const Script& script, float timeout = 60, bool opposite = false) {
    std::vector<char> handles;
    for (int r = 0; r < script.ranks; ++r) {
      devices_.push_back(opposite ? script.ranks - 1 - r : r);
      ranks_.emplace_back(devices_.back(), r, script, timeout);
      const std::vector<char> handle = ranks_.back().handle();
      handles.insert(handles.end(), handle.begin(), handle.end());
    }
    for (ExchangeRank& rank : ranks_) EXPECT_OK(rank.connect(handles));
  }
  ~LocalRanks() {
    for (int device : devices_) {
      cudaSetDevice(device);
      cudaDeviceSynchronize();
    }
  }
  int size() const { return static_cast<int>(ranks_.size()); }
  // The rank, with its device as the current one.
  ExchangeRank& use(int r) {
    EXPECT_CUDA(cudaSetDevice(devices_[static_cast<size_t>(r)]));
    return ranks_[static_cast<size_t>(r)];
  }
  void expect_results() {
    for (int r = 0; r < size(); ++r) use(r).expect_results();
  }

 private:
  std::deque<ExchangeRank> ranks_;
  std::vector<int> devices_;
};

// One thread makes the calls of all ranks, in any order of the ranks.
void run_on_one_thread(LocalRanks& ranks, const Script& script) {
  std::mt19937 random(1);
  for (const Step& step : script.steps) {
    const int first = static_cast<int>(random() % static_cast<unsigned>(ranks.size()));
    for (int i = 0; i < ranks.size(); ++i) ranks.use((first + i) % ranks.size()).enqueue(step);
  }
}

// A thread per rank makes its calls, with random delays.
void run_on_threads(LocalRanks& ranks, const Script& script) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      std::mt19937 random(static_cast<uint32_t>(r));
      for (const Step& step : script.steps) {
        if (random() % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
        ranks.use(r).enqueue(step);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class ExchangeCuda : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    if (count_devices() < 2) GTEST_SKIP() << "FEWER THAN TWO GPUS FOUND: the exchange tests did not run";
    int accessible = 0;
    ASSERT_EQ(cudaDeviceCanAccessPeer(&accessible, 0, 1), cudaSuccess);
    if (accessible == 0) GTEST_SKIP() << "NO PEER ACCESS BETWEEN GPUS: the exchange tests did not run";
  }
};

TEST_F(ExchangeCuda, OneThreadMakesTheCallsOfAllRanks) {
  for (int P = 2; P <= count_devices(); ++P) {
    const Script script(P, 400, static_cast<uint32_t>(P));
    LocalRanks ranks(script);
    run_on_one_thread(ranks, script);
    ranks.expect_results();
  }
}

TEST_F(ExchangeCuda, AThreadPerRankMakesItsCalls) {
  for (int P = 2; P <= count_devices(); ++P) {
    const Script script(P, 2000, static_cast<uint32_t>(P) + 100);
    LocalRanks ranks(script);
    run_on_threads(ranks, script);
    ranks.expect_results();
  }
}

using ExchangeOnOneGpu = CudaTest;

TEST_F(ExchangeOnOneGpu, OneRankAloneCopies) {
  const Script script(1, 100, 3);
  LocalRanks ranks(script);
  run_on_one_thread(ranks, script);
  ranks.expect_results();
}

// Each graph has three calls. Other calls run between the replays.
TEST_F(ExchangeCuda, GraphsAreReplayedBetweenOtherCalls) {
  const int P = count_devices();
  const Script script(P, 60, 5);
  LocalRanks ranks(script);
  std::vector<cudaGraphExec_t> graphs;
  for (int r = 0; r < P; ++r) {
    ExchangeRank& rank = ranks.use(r);
    cudaGraph_t graph = nullptr;
    EXPECT_CUDA(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeGlobal));
    for (size_t i = 0; i < 3; ++i) rank.enqueue(script.steps[i]);
    EXPECT_CUDA(cudaStreamEndCapture(rank.stream, &graph));
    EXPECT_CUDA(cudaGraphInstantiate(&graphs.emplace_back(), graph, 0));
    EXPECT_CUDA(cudaGraphUpload(graphs.back(), rank.stream));
    EXPECT_CUDA(cudaGraphDestroy(graph));
  }
  for (size_t round = 0; round + 3 < script.steps.size(); ++round) {
    for (int r = 0; r < P; ++r) {
      ExchangeRank& rank = ranks.use(r);
      if (round % 8 == 0) rank.clear();
      EXPECT_CUDA(cudaGraphLaunch(graphs[static_cast<size_t>(r)], rank.stream));
      rank.enqueue(script.steps[round + 3]);
      if (round % 3 == 0) EXPECT_CUDA(cudaGraphLaunch(graphs[static_cast<size_t>(r)], rank.stream));
    }
  }
  for (size_t i = 3; i < script.steps.size(); ++i) {
    for (int r = 0; r < P; ++r) ranks.use(r).enqueue(script.steps[i]);
  }
  ranks.expect_results();
  for (cudaGraphExec_t graph : graphs) EXPECT_CUDA(cudaGraphExecDestroy(graph));
}

// The second group numbers the devices in the opposite order.
TEST_F(ExchangeCuda, TwoExchangesOnOneStreamAreInterleaved) {
  const int P = count_devices();
  const Script script(P, 500, 6);
  const Script other_script(P, 500, 7);
  LocalRanks ranks(script);
  LocalRanks others(other_script, 60, true);
  for (size_t i = 0; i < script.steps.size(); ++i) {
    for (int r = 0; r < P; ++r) {
      ExchangeRank& rank = ranks.use(r);
      rank.enqueue(script.steps[i]);
      EXPECT_OK(others.use(P - 1 - r).call(other_script.steps[i], rank.stream));
    }
  }
  for (int r = 0; r < P; ++r) ranks.use(r).fetch();  // waits for its stream
  ranks.expect_results();
  others.expect_results();
}

TEST_F(ExchangeCuda, TwoExchangesOnTwoStreamsRunAtOnce) {
  const int P = count_devices();
  const Script script(P, 500, 8);
  const Script other_script(P, 500, 9);
  LocalRanks ranks(script);
  LocalRanks others(other_script, 60, true);
  std::vector<std::thread> threads;
  for (int r = 0; r < P; ++r) {
    threads.emplace_back([&, r] {
      std::mt19937 random(static_cast<uint32_t>(r));
      for (size_t i = 0; i < script.steps.size(); ++i) {
        if (random() % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
        ranks.use(r).enqueue(script.steps[i]);
        others.use(P - 1 - r).enqueue(other_script.steps[i]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ranks.expect_results();
  others.expect_results();
}

TEST_F(ExchangeCuda, AnExchangeIsReplacedByALargerOne) {
  for (uint32_t i = 0; i < 4; ++i) {
    const Script script(count_devices(), 50, 20 + i);
    LocalRanks ranks(script);
    run_on_threads(ranks, script);
    ranks.expect_results();
  }
}

TEST_F(ExchangeCuda, ARankThatMakesNoCallIsNamed) {
  Script script(2, 0, 1);
  script.steps.push_back({true, 1, 1000, false, false, false, 0, 0});
  script.out_bytes = 2000;
  LocalRanks ranks(script, 1);
  const auto start = std::chrono::steady_clock::now();
  ranks.use(0).enqueue(script.steps[0]);
  EXPECT_EQ(ranks.use(0).fetch(), std::vector<unsigned char>(2000, 0xff));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  constexpr char kMessage[] = "exchange: the block of rank 1 did not arrive within 1 s";
  EXPECT_REFUSED(ab_cuda_exchange_check(ranks.use(0).exchange), AB_INTERNAL, kMessage);
  EXPECT_REFUSED(ranks.use(0).call(script.steps[0], ranks.use(0).stream), AB_INTERNAL, kMessage);
  // The late rank finds the exchange broken.
  ranks.use(1).enqueue(script.steps[0]);
  EXPECT_EQ(ranks.use(1).fetch(), std::vector<unsigned char>(2000, 0xff));
  EXPECT_REFUSED(ab_cuda_exchange_check(ranks.use(1).exchange), AB_INTERNAL, "did not arrive");
}

// Makes call r on rank r. Both blocks of both outputs must be discarded.
void expect_different(const Step& first, const Step& second) {
  Script script(2, 0, 1);
  script.steps = {first, second};
  script.out_bytes = 2 * std::max(first.bytes, second.bytes);
  LocalRanks ranks(script);
  for (int r = 0; r < 2; ++r) ranks.use(r).enqueue(script.steps[static_cast<size_t>(r)]);
  for (int r = 0; r < 2; ++r) {
    const std::vector<unsigned char> out = ranks.use(r).fetch();
    const Step& step = script.steps[static_cast<size_t>(r)];
    EXPECT_EQ(out[static_cast<size_t>(r * step.bytes)], 0xff) << "its own block, which no peer writes";
    EXPECT_REFUSED(ab_cuda_exchange_check(ranks.use(r).exchange), AB_INTERNAL, "made another call");
  }
}

TEST_F(ExchangeCuda, DifferentCallsAreNoticed) {
  const auto step = [](int64_t bytes, bool stays, bool parts) {
    return Step{true, 0, bytes, false, stays, parts, 0, 0};
  };
  expect_different(step(64, true, false), step(128, true, false));
  expect_different(step(64, false, false), step(128, false, false));
  expect_different(step(100000, false, false), step(100016, false, false));
  expect_different(step(100000, true, false), step(100000, false, false));
  expect_different(step(100000, false, true), step(100000, false, false));
}

TEST_F(ExchangeCuda, CallsAreChecked) {
  const Script script(2, 1, 1);
  ExchangeRank alone(0, 0, script);
  EXPECT_REFUSED(alone.call(script.steps[0], alone.stream), AB_INVALID_ARGUMENT, "not connected");
  LocalRanks ranks(script);
  ExchangeRank& rank = ranks.use(0);
  EXPECT_CUDA(cudaSetDevice(1));
  EXPECT_REFUSED(rank.call(script.steps[0], rank.stream), AB_INVALID_ARGUMENT,
                 "got a call on device 1, expected its device 0");
  EXPECT_REFUSED(rank.connect(rank.handle()), AB_INVALID_ARGUMENT, "exchange that is connected");
  char text[4096];
  ab_cuda_exchange_describe(rank.exchange, text, sizeof(text));
  EXPECT_NE(std::strstr(text, "by peer access\nstatus=connected"), nullptr) << text;
}

TEST_F(ExchangeCuda, HandlesOfADestroyedExchangeAreRefused) {
  const Script script(2, 0, 1);
  ExchangeRank rank(0, 0, script);
  std::vector<char> handles = rank.handle();
  {
    ExchangeRank peer(1, 1, script);
    const std::vector<char> handle = peer.handle();
    handles.insert(handles.end(), handle.begin(), handle.end());
  }
  EXPECT_REFUSED(rank.connect(handles), AB_INVALID_ARGUMENT, "handles[1]: got an exchange that was destroyed");
}

void expect_processes(int ranks, const std::string& what) {
  for (const int status : run_ranks(ranks, {what}, std::chrono::seconds(120))) EXPECT_EQ(status, 0) << what;
}

TEST_F(ExchangeCuda, AProcessPerRankMakesItsCalls) {
  for (int P = 2; P <= count_devices(); ++P) expect_processes(P, "calls");
}

TEST_F(ExchangeCuda, AProcessPerRankReplacesItsExchange) { expect_processes(count_devices(), "replaces"); }

TEST_F(ExchangeCuda, AProcessThatEndsIsNamed) { expect_processes(count_devices(), "ends"); }

TEST_F(ExchangeCuda, KernelsAreLoadedBeforeTheFirstWait) {
  setenv("CUDA_MODULE_LOADING", "LAZY", 1);
  expect_processes(1, "on one thread");
  unsetenv("CUDA_MODULE_LOADING");
}

TEST(ExchangeWithoutCuda, CallsNameTheirArguments) {
  const ab_exchange_create_args args{sizeof(args), 0, 2, 2, 0, {}};
  ab_exchange* exchange = nullptr;
  EXPECT_REFUSED(ab_cuda_exchange_create(nullptr, &exchange), AB_INVALID_ARGUMENT, "ab_exchange_create_args: got NULL");
  EXPECT_REFUSED(ab_cuda_exchange_create(&args, nullptr), AB_INVALID_ARGUMENT, "exchange: got NULL");
  EXPECT_REFUSED(ab_cuda_exchange_create(&args, &exchange), AB_INVALID_ARGUMENT, "rank: got 2");
  EXPECT_EQ(exchange, nullptr);
  char bytes[AB_EXCHANGE_HANDLE_BYTES];
  EXPECT_REFUSED(ab_cuda_exchange_export(nullptr, bytes), AB_INVALID_ARGUMENT, "exchange: got NULL");
  EXPECT_REFUSED(ab_cuda_exchange_connect(nullptr, bytes, 512), AB_INVALID_ARGUMENT, "exchange: got NULL");
  EXPECT_REFUSED(ab_cuda_exchange_check(nullptr), AB_INVALID_ARGUMENT, "exchange: got NULL");
  EXPECT_OK(ab_cuda_exchange_destroy(nullptr));
  const ab_exchange_all_gather_args gather{sizeof(gather), nullptr, 0,       0,       0,       0,
                                           nullptr,        nullptr, nullptr, nullptr, nullptr, nullptr};
  EXPECT_REFUSED(ab_cuda_exchange_all_gather(&gather, nullptr), AB_INVALID_ARGUMENT, "exchange: got NULL");
  const ab_exchange_all_to_all_args regions{sizeof(regions), nullptr, 0, 0, 0, 0, nullptr, nullptr};
  EXPECT_REFUSED(ab_cuda_exchange_all_to_all(&regions, nullptr), AB_INVALID_ARGUMENT, "exchange: got NULL");
  for (const int32_t buffer : {0, AB_EXCHANGE_ALL_BUFFERS}) {
    const ab_exchange_release_args release{sizeof(release), nullptr, buffer, 0};
    EXPECT_REFUSED(ab_cuda_exchange_release(&release, nullptr), AB_INVALID_ARGUMENT, "exchange: got NULL");
  }
}

TEST(ExchangeWithoutCuda, CreateReturnsTheReason) {
  if (count_devices() > 0) GTEST_SKIP() << "a GPU is present";
  const ab_exchange_create_args args{sizeof(args), 0, 0, 2, 0, {}};
  ab_exchange* exchange = nullptr;
  EXPECT_REFUSED(ab_cuda_exchange_create(&args, &exchange), AB_UNSUPPORTED, "exchange: no usable GPU");
  char text[256];
  ab_cuda_exchange_describe(nullptr, text, sizeof(text));
  EXPECT_EQ(std::strncmp(text, "error=", 6), 0) << text;
}

// --- A rank that is a process of its own.

void make_calls(const Meeting& meeting, int rank, const Script& script, const std::string& name) {
  ExchangeRank own(rank, rank, script);
  EXPECT_OK(own.connect(meeting.gather("handle" + name, own.handle())));
  std::mt19937 random(static_cast<uint32_t>(rank));
  for (const Step& step : script.steps) {
    if (random() % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    own.enqueue(step);
    if (&step == &script.steps[9]) {  // later calls work
      own.enqueue({true, 1, 4096, false, true, true, 0, 0, false, true});
      own.enqueue({false, 2, 33333, false, true, true, 0, 0, false, true});
      EXPECT_OK(own.release(AB_EXCHANGE_ALL_BUFFERS, own.stream));
    }
  }
  own.expect_results();
}

// The last rank ends after the others have opened its memory.
void end_early(const Meeting& meeting, int rank, int ranks) {
  Script script(ranks, 0, 1);
  script.steps.push_back({true, 1, 100000, false, false, false, 0, 0});
  script.out_bytes = 100000 * ranks;
  ExchangeRank own(rank, rank, script, 1);
  EXPECT_OK(own.connect(meeting.gather("handle", own.handle())));
  meeting.wait("connected");
  if (rank == ranks - 1) _exit(0);
  own.enqueue(script.steps[0]);
  EXPECT_EQ(own.fetch(), std::vector<unsigned char>(static_cast<size_t>(script.out_bytes), 0xff));
  const std::string message = "the block of rank " + std::to_string(ranks - 1) + " did not arrive within 1 s";
  EXPECT_REFUSED(ab_cuda_exchange_check(own.exchange), AB_INTERNAL, message.c_str());
  EXPECT_REFUSED(own.release(AB_EXCHANGE_ALL_BUFFERS, own.stream), AB_INTERNAL, message.c_str());
}

int run_rank(int rank, int ranks, const std::string& folder, const std::string& what) {
  const Meeting meeting(folder, rank, ranks);
  if (what == "ends") {
    end_early(meeting, rank, ranks);
  } else if (what == "replaces") {
    for (uint32_t i = 0; i < 3; ++i) make_calls(meeting, rank, Script(ranks, 100, 40 + i), std::to_string(i));
  } else if (what == "on one thread") {
    const Script script(count_devices(), 100, 50);
    LocalRanks all(script);
    run_on_one_thread(all, script);
    all.expect_results();
  } else {
    make_calls(meeting, rank, Script(ranks, 2000, 30 + static_cast<uint32_t>(ranks)), "");
  }
  return ::testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed() ? 1 : 0;
}

}  // namespace
}  // namespace anabranch::testing

int main(int count, char** arguments) {
  ::testing::InitGoogleTest(&count, arguments);
  if (count == 6 && std::string(arguments[1]) == "--rank") {
    return anabranch::testing::run_rank(std::atoi(arguments[2]), std::atoi(arguments[3]), arguments[4], arguments[5]);
  }
  return RUN_ALL_TESTS();
}
