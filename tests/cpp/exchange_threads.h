// A group of ranks whose devices are threads of the CPU. It runs the protocol of src/exchange/protocol.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include "exchange/protocol.h"

namespace anabranch::exchange::testing {

struct ThreadMemory {
  static Word load(const Word* from) {
    return std::atomic_ref<Word>(*const_cast<Word*>(from)).load(std::memory_order_acquire);
  }
  static void store(Word* to, Word value) { std::atomic_ref<Word>(*to).store(value, std::memory_order_release); }
  static bool claim(Word* at) {
    Word none = 0;
    return std::atomic_ref<Word>(*at).compare_exchange_strong(none, 1);
  }
  static void fence() { asm volatile("" ::: "memory"); }  // x86 does not reorder loads
  static uint64_t now() {
    return static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
  }
  // Sleeps: on a busy machine, a thread that yields instead waits for the time slices of other programs.
  static void pause() { std::this_thread::sleep_for(std::chrono::microseconds(10)); }
};

using Bytes = std::vector<unsigned char>;

class ThreadGroup {
 public:
  ThreadGroup(int ranks, size_t buffer_bytes, std::chrono::nanoseconds limit) : ranks_(ranks) {
    for (int r = 0; r < ranks; ++r) {
      Rank& rank = all_.emplace_back();
      for (Bytes& buffer : rank.buffers) buffer.resize(buffer_bytes);
      set_number(r, number_of(kNoUse));
    }
    for (int r = 0; r < ranks; ++r) {
      Group& group = all_[static_cast<size_t>(r)].group;
      for (int other = 0; other < ranks; ++other) group.flags[other] = &flags(other);
      group.report = &all_[static_cast<size_t>(r)].report;
      group.limit = static_cast<uint64_t>(limit.count());
      group.rank = r;
      group.ranks = ranks;
    }
  }

  int ranks() const { return ranks_; }
  Protocol<ThreadMemory> protocol(int r) const { return Protocol<ThreadMemory>(all_[static_cast<size_t>(r)].group); }
  Flags& flags(int r) { return all_[static_cast<size_t>(r)].flags; }
  Bytes& buffer(int r, int b) { return all_[static_cast<size_t>(r)].buffers[b]; }
  Report report(int r) const {
    const Report& report = all_[static_cast<size_t>(r)].report;
    return {ThreadMemory::load(&report.failure), ThreadMemory::load(&report.seen),
            ThreadMemory::load(&report.expected)};
  }

  void set_limit(int r, std::chrono::nanoseconds limit) {
    all_[static_cast<size_t>(r)].group.limit = static_cast<uint64_t>(limit.count());
  }

  // Makes a number that of the last use, before any call.
  void set_number(int r, uint32_t number) {
    for (int b = 0; b < kBuffers; ++b) {
      flags(r).use[b] = make_use(number, Operation::none, 0);
      for (Word& released : flags(r).released[b]) released = flags(r).use[b];
    }
  }

  // The steps of src/exchange/cuda/steps.h on rank r.
  void begin(int r, int b, Operation operation, size_t bytes) {
    for (int peer = 0; peer < ranks_; ++peer) protocol(r).await_release(b, peer);
    protocol(r).begin(b, protocol(r).next_use(b, operation, static_cast<int64_t>(bytes)));
  }
  void push(int b, int to, size_t offset, const unsigned char* from, size_t bytes) {
    if (bytes > 0) std::memcpy(buffer(to, b).data() + offset, from, bytes);
  }
  void signal(int r, int b, int phase, int to) {
    protocol(r).signal(b, phase, to, ThreadMemory::load(&flags(r).use[b]));
  }
  void await(int r, int b, int phase = 0) {
    for (int peer = 0; peer < ranks_; ++peer) protocol(r).await_arrival(b, phase, peer);
  }
  void release(int r, int b) {
    for (int peer = 0; peer < ranks_; ++peer) protocol(r).release(b, peer);
  }
  // Copies the blocks of all ranks to `out`, or fills it with 0xff, and releases the buffer.
  void collect(int r, int b, const unsigned char* own, size_t bytes, Bytes* out) {
    for (int source = 0; source < ranks_ && bytes > 0; ++source) {
      const size_t at = static_cast<size_t>(source) * bytes;
      std::memcpy(out->data() + at, source == r ? own : buffer(r, b).data() + at, bytes);
    }
    if (!protocol(r).read_valid_data()) std::ranges::fill(*out, 0xff);
    release(r, b);
  }

  // A block of src/exchange/cuda/small_call.cu, which moves one slice of the block of every rank. x has a block per
  // destination.
  void run_slice(int r, int b, Operation operation, const Bytes& x, size_t bytes, int slice, int slices, Bytes* out) {
    const Word use = protocol(r).next_use(b, operation, static_cast<int64_t>(bytes));
    bool may_push = true;
    for (int peer = 0; peer < ranks_; ++peer) may_push = protocol(r).await_release(b, peer) && may_push;
    const size_t begin = bytes * static_cast<size_t>(slice) / static_cast<size_t>(slices);
    const size_t count = bytes * static_cast<size_t>(slice + 1) / static_cast<size_t>(slices) - begin;
    for (int step = 1; step < ranks_ && may_push; ++step) {
      const int to = (r + step) % ranks_;
      push(b, to, static_cast<size_t>(r) * bytes + begin, x.data() + static_cast<size_t>(to) * bytes + begin, count);
      protocol(r).signal(b, slice, to, use);
    }
    for (int source = 0; source < ranks_; ++source) {
      if (protocol(r).await_arrival(b, slice, source, use)) protocol(r).forget_arrival(b, slice, source);
      const size_t at = static_cast<size_t>(source) * bytes + begin;
      if (count > 0) std::memcpy(out->data() + at, source == r ? x.data() + at : buffer(r, b).data() + at, count);
    }
    const std::atomic_ref<uint32_t> finished(flags(r).finished_blocks[b]);
    if (finished.fetch_add(1) + 1 != static_cast<uint32_t>(slices)) return;
    finished = 0;
    if (!protocol(r).read_valid_data()) std::ranges::fill(*out, 0xff);
    for (int peer = 0; peer < ranks_; ++peer) protocol(r).release(b, peer, use);
    protocol(r).begin(b, use);
  }

 private:
  struct Rank {
    Flags flags{};
    Bytes buffers[kBuffers];
    Report report{};
    Group group{};
  };
  int ranks_;
  std::deque<Rank> all_;
};

}  // namespace anabranch::exchange::testing
