#include "emulator.h"

#include <ucontext.h>
#include <csetjmp>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <vector>

namespace emulation {
namespace {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes;
  uint32_t room;
};

struct Barrier {
  int arrived = 0;
  int64_t turn = 0;
};

// A thread begins by its context and changes by jumps, which don't ask the system for signal masks as contexts do.
struct Thread {
  ucontext_t context;
  jmp_buf place;
  bool begun = false;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  bool ended = false;
  const Barrier* barrier = nullptr;  // that it waits at; nullptr: it can run
  int64_t waits_for = 0;             // the turn of the barrier that has to be over
  int64_t shows = 0;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

struct Warp {
  Barrier barrier;
  char shown[2][kLanes][64];
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barrier;
  Barrier named[16];
  std::vector<char> memory;
  size_t shared_bytes = 0;
};

Options options;
Block block;
jmp_buf scheduler;
int current = 0;
const std::function<void()>* body = nullptr;

Thread& self() { return block.threads[static_cast<size_t>(current)]; }
Warp& warp() { return block.warps[static_cast<size_t>(current / kLanes)]; }

void yield() {
  if (_setjmp(self().place) == 0) _longjmp(scheduler, 1);
}

void resume() {
  if (_setjmp(scheduler) != 0) return;
  if (self().begun) _longjmp(self().place, 1);
  self().begun = true;
  setcontext(&self().context);
}

void run_thread() {
  (*body)();
  self().ended = true;
  if (!self().open.empty()) fail("a thread ended with copies that nobody waited for");
  yield();
}

int alive(int begin, int end) {
  int count = 0;
  for (int i = begin; i < end; ++i) count += block.threads[static_cast<size_t>(i)].ended ? 0 : 1;
  return count;
}

// Lets go who waits, where all that are alive have come.
bool release(Barrier& barrier, int begin, int end) {
  if (barrier.arrived == 0 || barrier.arrived < alive(begin, end)) return false;
  barrier.arrived = 0;
  ++barrier.turn;
  return true;
}

// `expected` threads end a turn; 0: the scheduler ends it by release().
void wait(Barrier& barrier, int expected = 0) {
  Thread& thread = self();
  thread.barrier = &barrier;
  thread.waits_for = barrier.turn;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.turn;
  }
  yield();
  thread.barrier = nullptr;
}

bool can_run(int index) {
  const Thread& thread = block.threads[static_cast<size_t>(index)];
  if (thread.ended) return false;
  return thread.barrier == nullptr || thread.barrier->turn > thread.waits_for;
}

void copy_now(const Copy& copy) {
  if (copy.to % copy.room != 0) fail("a copy of %u bytes to %u", copy.room, copy.to);
  if (copy.to + copy.room > block.shared_bytes) fail("a copy past the block's shared memory, to %u", copy.to);
  if (copy.bytes > copy.room) fail("a copy of %u bytes of %u", copy.bytes, copy.room);
  if (copy.bytes > 0) {
    if (reinterpret_cast<uintptr_t>(copy.from) % copy.room != 0)
      fail("a copy of %u bytes from %p", copy.room, copy.from);
    std::memcpy(block.memory.data() + copy.to, copy.from, copy.bytes);
  }
  std::memset(block.memory.data() + copy.to + copy.bytes, 0, copy.room - copy.bytes);
}

void run_block() {
  const int threads = static_cast<int>(block.threads.size());
  std::vector<int> order(block.threads.size());
  for (int i = 0; i < threads; ++i)
    order[static_cast<size_t>(i)] = options.order == Order::backward ? threads - 1 - i : i;
  std::mt19937 random(block_index.x);
  for (;;) {
    if (options.order == Order::shuffled) std::shuffle(order.begin(), order.end(), random);
    bool progress = false;
    for (const int index : order) {
      if (!can_run(index)) continue;
      current = index;
      thread_index = {static_cast<unsigned>(index), 0, 0};
      progress = true;
      resume();
      const int first = index / kLanes * kLanes;
      release(warp().barrier, first, std::min(first + kLanes, threads));
    }
    if (release(block.barrier, 0, threads)) progress = true;
    if (alive(0, threads) == 0) return;
    if (!progress) fail("threads wait for each other forever");
  }
}

}  // namespace

void set_options(Options wanted) { options = wanted; }

Dim3 thread_index;
Dim3 block_index;
Dim3 block_size;
Dim3 grid_size;
char* shared_memory() { return block.memory.data(); }
size_t shared_bytes() { return block.shared_bytes; }

void run_grid(int64_t blocks, int threads, size_t bytes, const std::function<void()>& kernel) {
  body = &kernel;
  grid_size = {static_cast<unsigned>(blocks), 1, 1};
  block_size = {static_cast<unsigned>(threads), 1, 1};
  if (block.threads.size() != static_cast<size_t>(threads))
    block.threads = std::vector<Thread>(static_cast<size_t>(threads));
  for (int64_t b = 0; b < blocks; ++b) {
    block_index = {static_cast<unsigned>(b), 0, 0};
    block.warps = std::vector<Warp>(static_cast<size_t>((threads + kLanes - 1) / kLanes));
    block.barrier = {};
    std::fill(std::begin(block.named), std::end(block.named), Barrier{});
    block.shared_bytes = bytes;
    block.memory.assign(bytes, static_cast<char>(0xff));  // NaN
    for (Thread& thread : block.threads) {
      thread.ended = false;
      thread.begun = false;
      thread.barrier = nullptr;
      thread.shows = 0;
      thread.groups.clear();
      thread.open.clear();
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.data();
      thread.context.uc_stack.ss_size = thread.stack.size();
      thread.context.uc_link = nullptr;
      makecontext(&thread.context, run_thread, 0);
    }
    run_block();
  }
}

void sync_block() { wait(block.barrier); }

void sync_threads(int barrier, int threads) { wait(block.named[barrier], threads); }

const char (*show(const void* value, size_t bytes))[64] {
  if (bytes > 64) fail("a lane shows %zu bytes", bytes);
  auto& shown = warp().shown[self().shows++ % 2];
  std::memcpy(shown[current % kLanes], value, bytes);
  wait(warp().barrier);
  return shown;
}

void start_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t room) {
  const Copy copy{to, from, bytes, room};
  if (options.copies == Copies::early) copy_now(copy);
  self().open.push_back(copy);
}

void end_group() {
  self().groups.push_back(std::move(self().open));
  self().open.clear();
}

void wait_for_groups(int pending) {
  auto& groups = self().groups;
  while (groups.size() > static_cast<size_t>(pending)) {
    if (options.copies == Copies::late) {
      for (const Copy& copy : groups.front()) copy_now(copy);
    }
    groups.pop_front();
  }
}

void fail(const char* format, ...) {
  std::fprintf(stderr, "emulation: block %u, thread %d: ", block_index.x, current);
  va_list values;
  va_start(values, format);
  std::vfprintf(stderr, format, values);
  va_end(values);
  std::fputc('\n', stderr);
  std::abort();
}

}  // namespace emulation
