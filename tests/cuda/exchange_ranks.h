// Ranks of an exchange, and random scripts of calls whose results are checked at the end.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "anabranch/exchange.h"
#include "device.h"

namespace anabranch::testing {

// A call that all ranks make. Byte i of the x of rank r is pattern(r, x_at + i).
struct Step {
  bool gathers;
  int buffer;
  int64_t bytes;  // of a block
  bool lockstep;
  bool stays;  // the result is read from the buffer, which is then released
  bool parts;  // made in two parts
  int64_t x_at;
  int64_t out_at;
  bool several = false;  // x and the result are three tensors each
  bool fails = false;    // abandoned after its first part
};

// A tensor of a call.
struct Piece {
  int64_t bytes;  // of a block
  int64_t x_at;
  int64_t out_at;
};

inline std::vector<Piece> pieces_of(const Step& step, int ranks) {
  if (!step.several) return {{step.bytes, step.x_at, step.out_at}};
  const int64_t first = step.bytes / 3;
  const int64_t second = step.bytes / 5;
  return {{first, step.x_at, step.out_at},
          {second, step.x_at + first, step.out_at + ranks * first},
          {step.bytes - first - second, step.x_at + first + second, step.out_at + ranks * (first + second)}};
}

inline unsigned char pattern(int rank, int64_t i) {
  return static_cast<unsigned char>((static_cast<uint64_t>(i) * 2654435761u >> 15) + static_cast<uint64_t>(rank) * 97);
}

struct Script {
  static constexpr int64_t kMaxBlock = 1 << 20;
  std::vector<Step> steps;
  int ranks;
  int64_t x_bytes;
  int64_t out_bytes = 0;

  Script(int ranks_, int count, uint32_t seed) : ranks(ranks_), x_bytes((ranks_ + 1) * kMaxBlock) {
    std::mt19937 random(seed);
    for (int i = 0; i < count; ++i) {
      constexpr int64_t kSizes[] = {0, 1, 3, 16, 100, 4096, 33333};
      int64_t bytes = kSizes[random() % std::size(kSizes)];
      if (random() % 64 == 0) bytes = kMaxBlock - static_cast<int64_t>(random() % 64);
      // Around the largest blocks that one kernel moves.
      if (random() % 32 == 0) bytes = kMaxBlock / 2 + static_cast<int64_t>(random() % 33) - 16;
      const bool aligned = random() % 2 == 0;
      const int64_t unit = aligned ? 16 : 1;
      const auto x_at = static_cast<int64_t>(random() % 50000) * unit % kMaxBlock;
      out_bytes += aligned ? (16 - out_bytes % 16) % 16 : static_cast<int64_t>(random() % 4);
      Step step{random() % 2 == 0,
                static_cast<int>(random() % 3),
                bytes,
                random() % 4 == 0,
                random() % 3 == 0,
                random() % 3 == 0,
                x_at,
                out_bytes};
      step.several = step.gathers && !step.lockstep && !step.stays && !step.parts;
      steps.push_back(step);
      out_bytes += bytes * ranks;
    }
  }
  int64_t buffer_bytes() const { return ranks * kMaxBlock + 64; }  // several tensors are padded

  // The number of bytes in the results of a rank that are wrong.
  int64_t wrong_bytes(int rank, const std::vector<unsigned char>& out) const {
    int64_t wrong = 0;
    for (const Step& step : steps) {
      for (const Piece& piece : pieces_of(step, ranks)) {
        for (int source = 0; source < ranks; ++source) {
          const int64_t from = piece.x_at + (step.gathers ? 0 : rank * piece.bytes);
          const int64_t at = piece.out_at + source * piece.bytes;
          for (int64_t i = 0; i < piece.bytes; ++i) {
            wrong += out[static_cast<size_t>(at + i)] != pattern(source, from + i);
          }
        }
      }
    }
    return wrong;
  }
};

// A rank with the device of its number. The current device of the calling thread must be that device, except in the
// constructor, connect() and destroy().
class ExchangeRank {
 public:
  ExchangeRank(int device, int rank, const Script& script, float timeout = 60) : rank_(rank), script_(script) {
    const int64_t bytes = script.buffer_bytes();
    const ab_exchange_create_args args{sizeof(args), device, rank, script.ranks, timeout, {bytes, bytes, bytes, 0}};
    EXPECT_OK(ab_cuda_exchange_create(&args, &exchange));
    EXPECT_CUDA(cudaSetDevice(device));
    EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    EXPECT_CUDA(cudaMalloc(&x_, static_cast<size_t>(script.x_bytes)));
    EXPECT_CUDA(cudaMalloc(&out_, static_cast<size_t>(std::max<int64_t>(script.out_bytes, 1))));
    EXPECT_CUDA(cudaMemset(out_, 0x5a, static_cast<size_t>(script.out_bytes)));
    std::vector<unsigned char> x(static_cast<size_t>(script.x_bytes));
    for (size_t i = 0; i < x.size(); ++i) x[i] = pattern(rank, static_cast<int64_t>(i));
    EXPECT_CUDA(cudaMemcpy(x_, x.data(), x.size(), cudaMemcpyHostToDevice));
    EXPECT_CUDA(cudaDeviceSynchronize());
  }
  ~ExchangeRank() {
    destroy();
    cudaStreamDestroy(stream);
    cudaFree(x_);
    cudaFree(out_);
  }
  ExchangeRank(const ExchangeRank&) = delete;
  ExchangeRank& operator=(const ExchangeRank&) = delete;

  std::vector<char> handle() const {
    std::vector<char> bytes(AB_EXCHANGE_HANDLE_BYTES);
    EXPECT_OK(ab_cuda_exchange_export(exchange, bytes.data()));
    return bytes;
  }
  ab_status connect(const std::vector<char>& handles) {
    return ab_cuda_exchange_connect(exchange, handles.data(), handles.size());
  }
  void destroy() {
    EXPECT_OK(ab_cuda_exchange_destroy(exchange));
    exchange = nullptr;
  }

  // Enqueues a call on a stream; returns its status.
  ab_status call(const Step& step, cudaStream_t on) {
    const int64_t rows = step.bytes * script_.ranks;
    ab_tensor x[3]{};
    ab_tensor out[3]{};
    const std::vector<Piece> pieces = pieces_of(step, script_.ranks);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const int64_t all = pieces[i].bytes * script_.ranks;
      x[i] = {x_ + pieces[i].x_at, AB_UINT8, 2, {step.gathers ? pieces[i].bytes : all, 1}, nullptr};
      out[i] = {out_ + pieces[i].out_at, AB_UINT8, 2, {all, 1}, nullptr};
    }
    const ab_exec exec{sizeof(ab_exec), 0, on, nullptr, 0};
    const ab_tensor* const to = step.stays ? nullptr : out;
    const auto more = [&](ab_tensor* tensors, size_t i) { return i < pieces.size() ? tensors + i : nullptr; };
    const auto run_part = [&](int32_t part) {
      const ab_exchange_all_gather_args gather{sizeof(gather), exchange,     step.buffer, step.lockstep, part, 0, x, to,
                                               more(x, 1),     more(out, 1), more(x, 2),  more(out, 2)};
      const ab_exchange_all_to_all_args regions{sizeof(regions), exchange, step.buffer, step.lockstep, part, 0, x, to};
      return step.gathers ? ab_cuda_exchange_all_gather(&gather, &exec) : ab_cuda_exchange_all_to_all(&regions, &exec);
    };
    ab_status status = run_part(step.parts || step.fails ? AB_EXCHANGE_START : AB_EXCHANGE_WHOLE);
    if (status.code == AB_OK && step.fails) return release(AB_EXCHANGE_ALL_BUFFERS, on);
    if (status.code == AB_OK && step.parts) status = run_part(AB_EXCHANGE_FINISH);
    if (status.code != AB_OK || !step.stays) return status;
    void* buffer = nullptr;
    int64_t bytes = 0;
    EXPECT_OK(ab_cuda_exchange_buffer(exchange, step.buffer, &buffer, &bytes));
    EXPECT_CUDA(cudaMemcpyAsync(out[0].data, buffer, static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, on));
    return release(step.buffer, on);
  }
  ab_status release(int32_t buffer, cudaStream_t on) {
    const ab_exec exec{sizeof(ab_exec), 0, on, nullptr, 0};
    const ab_exchange_release_args release{sizeof(release), exchange, buffer, 0};
    return ab_cuda_exchange_release(&release, &exec);
  }
  void enqueue(const Step& step) { EXPECT_OK(call(step, stream)); }

  std::vector<unsigned char> fetch() const {
    std::vector<unsigned char> out(static_cast<size_t>(script_.out_bytes));
    EXPECT_CUDA(cudaStreamSynchronize(stream));
    EXPECT_CUDA(cudaMemcpy(out.data(), out_, out.size(), cudaMemcpyDeviceToHost));
    return out;
  }
  // Overwrites the results, in stream order.
  void clear() { EXPECT_CUDA(cudaMemsetAsync(out_, 0x5a, static_cast<size_t>(script_.out_bytes), stream)); }
  void expect_results() const {
    EXPECT_EQ(script_.wrong_bytes(rank_, fetch()), 0) << "rank " << rank_;
    EXPECT_OK(ab_cuda_exchange_check(exchange));
  }

  ab_exchange* exchange = nullptr;
  cudaStream_t stream = nullptr;

 private:
  int rank_;
  const Script& script_;
  char* x_ = nullptr;
  char* out_ = nullptr;
};

}  // namespace anabranch::testing
