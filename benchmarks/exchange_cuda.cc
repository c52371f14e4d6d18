// bench_exchange_cuda: GB/s that each rank sends in exchanges between the GPUs of this machine, and the latency of
// small calls.
//
//   bench_exchange_cuda [--kib N]... [--mib N]... [--repeats N]
//
// For 2 to all GPUs and every size of a block (default 256 KiB, 32, 64 and 128 MiB), in one process and in a process
// per GPU:
//
//   copies      cudaMemcpyAsync pushes to all peers, without flags: the ceiling
//   stays       all_gather into the buffer, then release
//   all_gather  all_gather to an output
//   all_to_all  all_to_all to an output
//   lockstep    all_gather into the buffer with lockstep
//   stays beside, all_gather beside
//               for small blocks: while another exchange of the same devices pushes 32 MiB to each peer
//
// For blocks of at most 512 KiB, which one kernel moves if the call has an output, a figure is the microseconds of a
// call; for larger blocks, (P - 1) blocks over the time of a call in GB/s. The time is that of the slowest rank, the
// median of the repeats. Calls alternate between two buffers. A repeat is 4 calls; ranks are aligned before it by a
// small exchange on the device.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "exchange/cuda/exchange.h"
#include "exchange/cuda/steps.h"
#include "processes.h"

namespace anabranch::bench {

#define CHECK_CUDA(expression)                                                     \
  do {                                                                             \
    const cudaError_t failure_ = expression;                                       \
    if (failure_ != cudaSuccess) {                                                 \
      std::fprintf(stderr, "%s: %s\n", #expression, cudaGetErrorString(failure_)); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)
#define CHECK_OK(expression)                         \
  do {                                               \
    const ab_status status_ = expression;            \
    if (status_.code != AB_OK) {                     \
      std::fprintf(stderr, "%s\n", status_.message); \
      std::exit(1);                                  \
    }                                                \
  } while (false)

constexpr const char* kNames[] = {"copies", "stays", "all_gather", "all_to_all", "lockstep"};
constexpr const char* kSmallNames[] = {"stays beside", "all_gather beside"};
constexpr int kCalls = 4;
constexpr int kAlignBuffer = 2;
constexpr int64_t kPushBytes = 32 << 20;

bool is_beside(const std::string& name) { return name.ends_with(" beside"); }

// An exchange of a rank with the device of its number.
class Exchange {
 public:
  Exchange(int rank, int ranks, const int64_t (&bytes)[3]) {
    const ab_exchange_create_args args{sizeof(args), rank, rank, ranks, 60, {bytes[0], bytes[1], bytes[2], 0}};
    CHECK_OK(ab_cuda_exchange_create(&args, &exchange_));
  }
  ~Exchange() { CHECK_OK(ab_cuda_exchange_destroy(exchange_)); }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  std::vector<char> handle() const {
    std::vector<char> bytes(AB_EXCHANGE_HANDLE_BYTES);
    CHECK_OK(ab_cuda_exchange_export(exchange_, bytes.data()));
    return bytes;
  }
  void connect(const std::vector<char>& handles) {
    CHECK_OK(ab_cuda_exchange_connect(exchange_, handles.data(), handles.size()));
  }

 protected:
  ab_exchange* exchange_ = nullptr;
};

// Another exchange, whose pushes occupy the copy engines.
class Push : public Exchange {
 public:
  Push(int rank, int ranks) : Exchange(rank, ranks, {kPushBytes * ranks, 0, 0}), rank_(rank) {}

  void start(cudaStream_t stream) { call(AB_EXCHANGE_START, stream); }
  void finish(cudaStream_t stream) {
    call(AB_EXCHANGE_FINISH, stream);
    const ab_exec exec{sizeof(ab_exec), 0, stream, nullptr, 0};
    const ab_exchange_release_args release{sizeof(release), exchange_, 0, 0};
    CHECK_OK(ab_cuda_exchange_release(&release, &exec));
  }

 private:
  // x is this rank's place in the buffer.
  void call(int32_t part, cudaStream_t stream) {
    void* buffer = nullptr;
    int64_t bytes = 0;
    CHECK_OK(ab_cuda_exchange_buffer(exchange_, 0, &buffer, &bytes));
    const ab_tensor x{static_cast<char*>(buffer) + rank_ * kPushBytes, AB_UINT8, 2, {kPushBytes, 1}, nullptr};
    const ab_exec exec{sizeof(ab_exec), 0, stream, nullptr, 0};
    const ab_exchange_all_gather_args args{sizeof(args), exchange_, 0,       0,       part,    0,
                                           &x,           nullptr,   nullptr, nullptr, nullptr, nullptr};
    CHECK_OK(ab_cuda_exchange_all_gather(&args, &exec));
  }

  int rank_;
};

// A rank with its operands.
class Rank : public Exchange {
 public:
  Rank(int rank, int ranks, int64_t bytes)
      : Exchange(rank, ranks, {ranks * bytes, ranks * bytes, int64_t{64} * ranks}),
        rank_(rank),
        ranks_(ranks),
        bytes_(bytes) {
    const int64_t all = ranks * bytes;
    use();
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t& event : events_) CHECK_CUDA(cudaEventCreate(&event));
    CHECK_CUDA(cudaMalloc(&x_, static_cast<size_t>(all)));
    CHECK_CUDA(cudaMalloc(&out_, static_cast<size_t>(all)));
    CHECK_CUDA(cudaMemset(x_, rank + 1, static_cast<size_t>(all)));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  ~Rank() {
    use();
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaStreamDestroy(stream_));
    for (cudaEvent_t event : events_) CHECK_CUDA(cudaEventDestroy(event));
    CHECK_CUDA(cudaFree(x_));
    CHECK_CUDA(cudaFree(out_));
  }
  void use() const { CHECK_CUDA(cudaSetDevice(rank_)); }

  void align() { gather(kAlignBuffer, 64, false, true); }
  cudaStream_t stream() const { return stream_; }
  void begin() { CHECK_CUDA(cudaEventRecord(events_[0], stream_)); }
  void end() { CHECK_CUDA(cudaEventRecord(events_[1], stream_)); }
  float milliseconds() const {
    float time = 0;
    CHECK_CUDA(cudaEventSynchronize(events_[1]));
    CHECK_CUDA(cudaEventElapsedTime(&time, events_[0], events_[1]));
    CHECK_OK(ab_cuda_exchange_check(exchange_));
    return time;
  }
  void call(const std::string& name, int buffer) {
    if (name == "copies") return copy(buffer);
    if (name == "all_to_all") return regions(buffer);
    gather(buffer, bytes_, name == "lockstep", !name.starts_with("all_gather"));
  }

 private:
  void copy(int buffer) {
    CHECK_OK(cuda::fork(*exchange_, stream_));
    for (int step = 1; step < ranks_; ++step) {
      CHECK_OK(cuda::push(*exchange_, buffer, cuda::push_order(*exchange_, step), rank_ * bytes_, x_, bytes_));
    }
    CHECK_OK(cuda::end_copies(*exchange_, buffer));
    CHECK_OK(cuda::await_local_copies(*exchange_, buffer, stream_));
    CHECK_OK(cuda::await_pushes(*exchange_, buffer, stream_));
  }
  void gather(int buffer, int64_t bytes, bool lockstep, bool stays) {
    const ab_tensor x{x_, AB_UINT8, 2, {bytes, 1}, nullptr};
    const ab_tensor out{out_, AB_UINT8, 2, {bytes * ranks_, 1}, nullptr};
    const ab_exec exec{sizeof(ab_exec), 0, stream_, nullptr, 0};
    const ab_exchange_all_gather_args args{sizeof(args),           exchange_, buffer,  lockstep, 0,      0, &x,
                                           stays ? nullptr : &out, nullptr,   nullptr, nullptr,  nullptr};
    CHECK_OK(ab_cuda_exchange_all_gather(&args, &exec));
    const ab_exchange_release_args release{sizeof(release), exchange_, buffer, 0};
    if (stays) CHECK_OK(ab_cuda_exchange_release(&release, &exec));
  }
  void regions(int buffer) {
    const ab_tensor x{x_, AB_UINT8, 2, {bytes_ * ranks_, 1}, nullptr};
    const ab_tensor out{out_, AB_UINT8, 2, {bytes_ * ranks_, 1}, nullptr};
    const ab_exec exec{sizeof(ab_exec), 0, stream_, nullptr, 0};
    const ab_exchange_all_to_all_args args{sizeof(args), exchange_, buffer, 0, 0, 0, &x, &out};
    CHECK_OK(ab_cuda_exchange_all_to_all(&args, &exec));
  }

  int rank_;
  int ranks_;
  int64_t bytes_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[2] = {};
  char* x_ = nullptr;
  char* out_ = nullptr;
};

// Calls f(rank) for all ranks of this process, with the rank's device as the current one.
template <class F>
void for_each(const std::vector<std::unique_ptr<Rank>>& ranks, const F& f) {
  for (const auto& rank : ranks) {
    rank->use();
    f(*rank);
  }
}

using Pushes = std::vector<std::unique_ptr<Push>>;  // of the same ranks

// The milliseconds of a call, the slowest rank of this process, for every repeat.
std::vector<float> time_calls(const std::vector<std::unique_ptr<Rank>>& ranks, const Pushes& pushes,
                              const std::string& name, int repeats) {
  std::vector<float> times;
  for (int repeat = -2; repeat < repeats; ++repeat) {
    for_each(ranks, [](Rank& rank) { rank.align(); });
    const auto for_each_push = [&](const auto& f) {
      size_t i = 0;
      if (is_beside(name)) for_each(ranks, [&](Rank& rank) { f(*pushes[i++], rank.stream()); });
    };
    for_each_push([](Push& push, cudaStream_t stream) { push.start(stream); });
    for_each(ranks, [](Rank& rank) { rank.begin(); });
    for (int call = 0; call < kCalls; ++call) {
      for_each(ranks, [&](Rank& rank) { rank.call(name, call % 2); });
    }
    for_each(ranks, [](Rank& rank) { rank.end(); });
    for_each_push([](Push& push, cudaStream_t stream) { push.finish(stream); });
    float slowest = 0;
    for_each(ranks, [&](Rank& rank) { slowest = std::max(slowest, rank.milliseconds() / kCalls); });
    if (repeat >= 0) times.push_back(slowest);
  }
  return times;
}

template <class Exchanges, class Gather>
void connect(const Exchanges& exchanges, const char* name, const Gather& gather) {
  std::vector<char> handles;
  for (const auto& exchange : exchanges) {
    const std::vector<char> handle = exchange->handle();
    handles.insert(handles.end(), handle.begin(), handle.end());
  }
  handles = gather(name, handles);
  for (const auto& exchange : exchanges) exchange->connect(handles);
}

// Makes the measurements on this process's ranks. gather(name, bytes) returns the bytes of all processes.
template <class Gather>
void measure(const std::vector<int>& own, int ranks, int64_t bytes, int repeats, const Gather& gather) {
  const bool is_small = bytes <= exchange::kSmallBytes;
  std::vector<std::unique_ptr<Rank>> mine;
  Pushes pushes;
  for (const int r : own) {
    mine.push_back(std::make_unique<Rank>(r, ranks, bytes));
    if (is_small) pushes.push_back(std::make_unique<Push>(r, ranks));
  }
  connect(mine, "handles", gather);
  if (is_small) connect(pushes, "handles of pushes", gather);
  const bool prints = own[0] == 0;
  std::vector<std::string> names(std::begin(kNames), std::end(kNames));
  if (is_small) names.insert(names.end(), std::begin(kSmallNames), std::end(kSmallNames));
  for (const std::string& name : names) {
    const std::vector<float> times = time_calls(mine, pushes, name, repeats);
    const auto* first = reinterpret_cast<const char*>(times.data());
    const std::vector<char> all = gather(name.c_str(), {first, first + times.size() * sizeof(float)});
    std::vector<float> slowest(times.size(), 0);
    for (size_t i = 0; i < all.size() / sizeof(float); ++i) {
      float time = 0;
      std::memcpy(&time, all.data() + i * sizeof(float), sizeof(float));
      slowest[i % times.size()] = std::max(slowest[i % times.size()], time);
    }
    std::ranges::sort(slowest);
    const double milliseconds = slowest[slowest.size() / 2];
    const double rate = static_cast<double>((ranks - 1) * bytes) / milliseconds * 1e-6;
    if (prints && is_small) std::printf("  %s %4.1f us", name.c_str(), milliseconds * 1e3);
    if (prints && !is_small) std::printf("  %s %4.0f", name.c_str(), rate);
  }
  if (prints) std::printf("\n");
  std::fflush(stdout);
  gather("end", {});
}

int run(const std::vector<int64_t>& sizes, int repeats) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 2) {
    std::printf("FEWER THAN TWO GPUS FOUND\n");
    return 1;
  }
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  std::printf("%d x %s; GB/s that a rank sends, or us of a small call\n", devices, properties.name);
  for (int P = 2; P <= devices; ++P) {
    for (const int64_t bytes : sizes) {
      const bool is_mib = bytes % (1 << 20) == 0;
      const long long count = bytes >> (is_mib ? 20 : 10);
      const char* const unit = is_mib ? "MiB" : "KiB";
      std::printf("P = %d, %4lld %s blocks, one process:    ", P, count, unit);
      std::vector<int> all;
      for (int r = 0; r < P; ++r) all.push_back(r);
      measure(all, P, bytes, repeats, [](const char*, std::vector<char> own) { return own; });
      std::printf("P = %d, %4lld %s blocks, %d processes:    ", P, count, unit, P);
      std::fflush(stdout);
      const auto statuses =
          testing::run_ranks(P, {std::to_string(bytes), std::to_string(repeats)}, std::chrono::seconds(120));
      if (std::ranges::any_of(statuses, [](int status) { return status != 0; })) return 1;
    }
  }
  return 0;
}

}  // namespace anabranch::bench

int main(int count, char** arguments) {
  using namespace anabranch;
  const std::vector<std::string> words(arguments + 1, arguments + count);
  if (words.size() == 6 && words[0] == "--rank") {
    const int rank = std::stoi(words[1]);
    const int ranks = std::stoi(words[2]);
    const testing::Meeting meeting(words[3], rank, ranks);
    bench::measure({rank}, ranks, std::stoll(words[4]), std::stoi(words[5]),
                   [&](const char* name, const std::vector<char>& bytes) { return meeting.gather(name, bytes); });
    return 0;
  }
  std::vector<int64_t> sizes;
  int repeats = 10;
  for (size_t i = 0; i < words.size(); i += 2) {
    const int64_t value = i + 1 < words.size() ? std::atoll(words[i + 1].c_str()) : 0;
    if (words[i] == "--mib" && value > 0 && value <= 4096) {
      sizes.push_back(value << 20);
    } else if (words[i] == "--kib" && value > 0 && value <= 4096 << 10) {
      sizes.push_back(value << 10);
    } else if (words[i] == "--repeats" && value > 0) {
      repeats = static_cast<int>(value);
    } else {
      std::printf("got %s, expected --mib 1..4096, --kib 1..4194304 or --repeats N\n", words[i].c_str());
      return 2;
    }
  }
  if (sizes.empty()) sizes = {256 << 10, 32 << 20, 64 << 20, 128 << 20};
  return bench::run(sizes, repeats);
}
