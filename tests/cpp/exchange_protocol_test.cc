// The protocol of exchanges, with threads as devices. Names with "Threads" run under ThreadSanitizer, which finds reads
// of data that has not arrived and writes of data that has not been released.
#include <gtest/gtest.h>

#include <future>
#include <random>

#include "exchange_threads.h"

namespace anabranch::exchange::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kLong{30};
constexpr size_t kMaxBlock = 80;

// Byte i of the block that `source` sends to `to` in a call.
unsigned char byte_of(int call, int source, int to, size_t i) {
  return static_cast<unsigned char>(call * 31 + source * 7 + to * 3 + static_cast<int>(i));
}

Bytes block_of(int call, int source, int to, size_t bytes) {
  Bytes block(bytes);
  for (size_t i = 0; i < bytes; ++i) block[i] = byte_of(call, source, to, i);
  return block;
}

// What all ranks know about a call.
struct Plan {
  int buffer;
  Operation operation;
  size_t bytes;
  bool lockstep;
  int phases;
  bool stays_in_buffer;
  int slices;  // of a small call; 0: no small call

  int column(int to) const { return operation == Operation::all_to_all ? to : 0; }
};

Plan plan_of(int call, uint32_t seed, int phases) {
  std::mt19937 random(seed + static_cast<uint32_t>(call) * 977u);
  return {static_cast<int>(random() % kBuffers),
          random() % 2 == 0 ? Operation::all_gather : Operation::all_to_all,
          random() % (kMaxBlock / 16 + 1) * 16,
          random() % 4 == 0,
          phases,
          random() % 2 == 0,
          static_cast<int>(random() % 5)};
}

void delay(std::mt19937& random) {
  switch (random() % 32) {
    case 0: std::this_thread::sleep_for(std::chrono::microseconds(random() % 100)); break;
    case 1:
    case 2: std::this_thread::yield(); break;
    default: break;
  }
}

// The x of rank r: a block per destination.
Bytes x_of(const Plan& plan, int call, int r, int ranks) {
  Bytes x;
  for (int to = 0; to < ranks; ++to) {
    const Bytes block = block_of(call, r, plan.column(to), plan.bytes);
    x.insert(x.end(), block.begin(), block.end());
  }
  return x;
}

Bytes expected_at(const Plan& plan, int call, int r, int ranks) {
  Bytes all;
  for (int source = 0; source < ranks; ++source) {
    const Bytes block = block_of(call, source, plan.column(r), plan.bytes);
    all.insert(all.end(), block.begin(), block.end());
  }
  return all;
}

void push_all(ThreadGroup& group, const Plan& plan, int r, const Bytes& x, std::mt19937& random) {
  const int ranks = group.ranks();
  for (int step = 1; step < ranks; ++step) {
    const int to = (r + step) % ranks;
    if (plan.lockstep && step > 1) group.protocol(r).await_arrival(plan.buffer, 0, (r - step + 1 + ranks) % ranks);
    const size_t part = plan.bytes / static_cast<size_t>(plan.phases);
    for (int phase = 0; phase < plan.phases; ++phase) {
      delay(random);
      const size_t at = static_cast<size_t>(phase) * part;
      group.push(plan.buffer, to, static_cast<size_t>(r) * plan.bytes + at,
                 x.data() + static_cast<size_t>(to) * plan.bytes + at, part);
      group.signal(r, plan.buffer, phase, to);
    }
  }
}

// A small call of rank r: what it reads. The slices run one after another, or at once.
Bytes run_small(ThreadGroup& group, const Plan& plan, int r, const Bytes& x, std::mt19937& random) {
  Bytes out(x.size());
  const Operation operation =
      plan.operation == Operation::all_gather ? Operation::small_all_gather : Operation::small_all_to_all;
  const bool at_once = random() % 8 == 0;
  std::vector<std::thread> blocks;
  for (int slice = 0; slice < plan.slices; ++slice) {
    delay(random);
    const auto block = [&group, &plan, operation, r, &x, slice, &out] {
      group.run_slice(r, plan.buffer, operation, x, plan.bytes, slice, plan.slices, &out);
    };
    if (at_once) {
      blocks.emplace_back(block);
    } else {
      block();
    }
  }
  for (std::thread& block : blocks) block.join();
  return out;
}

// A call of rank r: what it reads. The pushes may run on another thread, as on the side stream.
Bytes run(ThreadGroup& group, const Plan& plan, int call, int r, std::mt19937& random) {
  const int ranks = group.ranks();
  const Bytes x = x_of(plan, call, r, ranks);
  const unsigned char* own = x.data() + static_cast<size_t>(r) * plan.bytes;
  if (plan.slices > 0) return run_small(group, plan, r, x, random);
  Bytes out(x.size());
  delay(random);
  group.begin(r, plan.buffer, plan.operation, plan.bytes);
  std::future<void> side;
  if (random() % 8 == 0) {
    side = std::async(std::launch::async, [&group, &plan, r, &x, seed = random()] {
      std::mt19937 own_random(seed);
      push_all(group, plan, r, x, own_random);
    });
  } else {
    push_all(group, plan, r, x, random);
  }
  for (int phase = 0; phase < plan.phases; ++phase) group.await(r, plan.buffer, phase);
  if (plan.stays_in_buffer) {
    Bytes& buffer = group.buffer(r, plan.buffer);
    std::copy_n(own, plan.bytes, buffer.data() + static_cast<size_t>(r) * plan.bytes);
    delay(random);
    std::copy_n(buffer.data(), out.size(), out.data());
    group.release(r, plan.buffer);
  } else {
    group.collect(r, plan.buffer, own, plan.bytes, &out);
  }
  if (side.valid()) side.wait();
  return out;
}

// Makes `calls` calls on every rank, and expects every block.
void expect_blocks(ThreadGroup& group, int calls, uint32_t seed, int phases = 1) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int r = 0; r < group.ranks(); ++r) {
    threads.emplace_back([&, r] {
      std::mt19937 random(seed * 100 + static_cast<uint32_t>(r));
      for (int call = 0; call < calls; ++call) {
        const Plan plan = plan_of(call, seed, phases);
        wrong += run(group, plan, call, r, random) != expected_at(plan, call, r, group.ranks());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  for (int r = 0; r < group.ranks(); ++r) EXPECT_EQ(group.report(r).failure, 0u);
}

size_t bytes_for(int ranks) { return static_cast<size_t>(ranks) * kMaxBlock; }

TEST(ExchangeThreads, EveryBlockIsReadAfterItArrivedAndBeforeItIsOverwritten) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    ThreadGroup group(ranks, bytes_for(ranks), kLong);
    expect_blocks(group, ranks == 8 ? 400 : 1500, static_cast<uint32_t>(ranks));
  }
}

TEST(ExchangeThreads, PhasesArriveOneByOne) {
  for (const int phases : {2, 16}) {
    ThreadGroup group(3, bytes_for(3), kLong);
    expect_blocks(group, 400, 11, phases);
  }
}

TEST(ExchangeThreads, NumbersOfUsesWrapAround) {
  ThreadGroup group(3, bytes_for(3), kLong);
  for (int r = 0; r < 3; ++r) group.set_number(r, 0xffffffu - 20);
  expect_blocks(group, 400, 12);
  for (int b = 0; b < kBuffers; ++b) EXPECT_LT(number_of(group.flags(0).use[b]), 0xffffu);
}

// The number of the second use is that of the first one, as after 2^24 uses.
TEST(ExchangeThreads, FlagsOfASmallCallAreNotThoseOfALaterOne) {
  ThreadGroup group(2, 64, kLong);
  const Bytes x(64, 1);
  for (int use = 0; use < 2; ++use) {
    for (int r = 0; r < 2; ++r) group.set_number(r, 7);
    if (use == 1) group.set_limit(0, milliseconds(1));
    std::vector<std::thread> ranks;
    Bytes outs[2] = {Bytes(64), Bytes(64)};
    for (int r = 0; r < 2 - use; ++r) {
      ranks.emplace_back([&, r] {
        for (int slice = 0; slice < 3; ++slice) {
          group.run_slice(r, 0, Operation::small_all_gather, x, 32, slice, 3, &outs[r]);
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(outs[0], use == 0 ? x : Bytes(64, 0xff));
  }
  EXPECT_EQ(unpack(group.report(0).failure).kind, FailureKind::not_arrived);
}

TEST(ExchangeThreads, ExchangesOfOneDeviceMayBeInterleavedInOneOrder) {
  ThreadGroup first(4, bytes_for(4), kLong);
  ThreadGroup second(4, bytes_for(4), kLong);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int r = 0; r < 4; ++r) {
    threads.emplace_back([&, r] {
      std::mt19937 random(static_cast<uint32_t>(r));
      for (int call = 0; call < 1000; ++call) {
        const Plan plan = plan_of(call, 5, 1);
        // Rank r has another number in the second group.
        const bool is_first = plan.bytes % 32 == 0;
        const int rank = is_first ? r : 3 - r;
        wrong += run(is_first ? first : second, plan, call, rank, random) != expected_at(plan, call, rank, 4);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ExchangeThreads, ExchangesMayRunAtOnce) {
  ThreadGroup first(3, bytes_for(3), kLong);
  ThreadGroup second(3, bytes_for(3), kLong);
  std::thread other([&] { expect_blocks(second, 1000, 7); });
  expect_blocks(first, 1000, 8);
  other.join();
}

// One rank stops after some calls. Other ranks read the right blocks or bytes 0xff, and all reports name the rank.
TEST(ExchangeFailures, ARankThatStopsIsNamedAndNoWrongBlockIsRead) {
  for (const int ranks : {2, 5}) {
    ThreadGroup group(ranks, bytes_for(ranks), kLong);
    const int stopped = ranks - 1;
    constexpr int kGoodCalls = 50;
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    std::atomic<int> discarded{0};
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        std::mt19937 random(static_cast<uint32_t>(r));
        for (int call = 0; call < kGoodCalls + 40; ++call) {
          if (r == stopped && call == kGoodCalls) return;
          if (call == kGoodCalls) group.set_limit(r, seconds(1));
          Plan plan = plan_of(call, 3, 1);
          plan.bytes += 16;
          plan.bytes = std::min(plan.bytes, kMaxBlock);
          plan.stays_in_buffer = false;
          const Bytes read = run(group, plan, call, r, random);
          const bool is_discarded = read == Bytes(read.size(), 0xff);
          discarded += is_discarded;
          wrong += !is_discarded && read != expected_at(plan, call, r, ranks);
          if (call < kGoodCalls) wrong += is_discarded;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(discarded, (ranks - 1) * 40);
    for (int r = 0; r < stopped; ++r) {
      const Failure failure = unpack(group.report(r).failure);
      EXPECT_EQ(failure.kind, FailureKind::not_arrived);
      EXPECT_EQ(failure.rank, static_cast<uint32_t>(stopped));
    }
    EXPECT_NE(group.flags(stopped).failure, 0u) << "a rank that returns must find the exchange broken";
  }
}

// Rank 1 is late to read its buffer. Rank 0 does not get its release in time and pushes all the same, as a graph does.
TEST(ExchangeFailures, DataThatWasOverwrittenWithoutPermissionIsDiscarded) {
  ThreadGroup group(2, 32, milliseconds(1));
  const Bytes x(16, 1);
  Bytes out(32);
  for (int r = 0; r < 2; ++r) {
    group.begin(r, 0, Operation::all_gather, 16);
    group.push(0, 1 - r, static_cast<size_t>(r) * 16, x.data(), 16);
    group.signal(r, 0, 0, 1 - r);
  }
  group.await(1, 0);
  group.await(0, 0);
  group.collect(0, 0, x.data(), 16, &out);
  EXPECT_EQ(out, Bytes(32, 1));
  group.begin(0, 0, Operation::all_gather, 16);
  EXPECT_EQ(unpack(group.report(0).failure).kind, FailureKind::not_released);
  group.push(0, 1, 0, Bytes(16, 2).data(), 16);
  group.collect(1, 0, x.data(), 16, &out);
  EXPECT_EQ(out, Bytes(32, 0xff));
  EXPECT_EQ(unpack(group.report(1).failure).rank, 1u);
  EXPECT_EQ(group.flags(0).released[0][1], kNoUse) << "a broken exchange releases nothing";
}

TEST(ExchangeFailures, NobodyPushesToARankThatIsNotConnected) {
  ThreadGroup group(2, 32, milliseconds(1));
  group.flags(0).released[0][1] = 0;
  group.begin(0, 0, Operation::all_gather, 16);
  const Failure failure = unpack(group.report(0).failure);
  EXPECT_EQ(failure.kind, FailureKind::not_released);
  EXPECT_EQ(failure.rank, 1u);
}

TEST(ExchangeFailures, DifferentCallsAreNoticedAtOnce) {
  for (const bool other_size : {true, false}) {
    ThreadGroup group(2, 64, kLong);
    group.begin(0, 0, Operation::all_gather, 16);
    group.begin(1, 0, other_size ? Operation::all_gather : Operation::all_to_all, other_size ? 32 : 16);
    group.signal(0, 0, 0, 1);
    group.await(1, 0);
    const Report report = group.report(1);
    EXPECT_EQ(unpack(report.failure).kind, FailureKind::other_call);
    EXPECT_EQ(unpack(report.failure).rank, 0u);
    EXPECT_EQ(report.seen, make_use(2, Operation::all_gather, 16));
    EXPECT_EQ(report.expected, group.flags(1).use[0]);
    group.await(0, 0);
    EXPECT_EQ(group.report(0).failure, report.failure) << "other ranks do not wait for their own limit";
  }
}

TEST(ExchangeFailures, ASmallCallBesideAnotherOneIsNoticed) {
  ThreadGroup group(2, 64, kLong);
  std::thread other([&] {
    group.begin(0, 0, Operation::all_gather, 32);
    group.signal(0, 0, 0, 1);
    group.await(0, 0);
  });
  Bytes out(64);
  const Bytes x(64, 1);
  for (int slice = 0; slice < 3; ++slice) {
    group.run_slice(1, 0, Operation::small_all_gather, x, 32, slice, 3, &out);
  }
  other.join();
  EXPECT_EQ(out, Bytes(64, 0xff));
  for (int r = 0; r < 2; ++r) EXPECT_EQ(unpack(group.report(r).failure).kind, FailureKind::other_call);
}

TEST(ExchangeFailures, ABufferThatWasNotReleasedIsNoticedAtOnce) {
  ThreadGroup group(2, 64, kLong);
  for (int r = 0; r < 2; ++r) {
    group.begin(r, 1, Operation::all_gather, 0);
    group.signal(r, 1, 0, 1 - r);
  }
  group.await(0, 1);
  group.release(1, 1);
  group.begin(0, 1, Operation::all_gather, 0);
  const Failure failure = unpack(group.report(0).failure);
  EXPECT_EQ(failure.kind, FailureKind::unreleased);
  EXPECT_EQ(failure.rank, 0u);
  EXPECT_EQ(failure.buffer, 1u);
}

TEST(ExchangeWords, HoldTheirFields) {
  const Word use = make_use(0xabcdef, Operation::all_to_all, kMaxBlockBytes);
  EXPECT_EQ(number_of(use), 0xabcdefu);
  EXPECT_EQ(operation_of(use), Operation::all_to_all);
  EXPECT_EQ(block_bytes_of(use), kMaxBlockBytes);
  EXPECT_EQ(operation_of(make_use(1, Operation::small_all_to_all, 0)), Operation::small_all_to_all);
  EXPECT_EQ(next_number(0xffffff), 1u);
  const Failure failure = unpack(pack({FailureKind::other_call, 15, 14, 13, 3, 0xffffff}));
  EXPECT_EQ(failure.kind, FailureKind::other_call);
  EXPECT_EQ(failure.rank, 15u);
  EXPECT_EQ(failure.noticed_by, 14u);
  EXPECT_EQ(failure.phase, 13u);
  EXPECT_EQ(failure.buffer, 3u);
  EXPECT_EQ(failure.number, 0xffffffu);
}

}  // namespace
}  // namespace anabranch::exchange::testing
